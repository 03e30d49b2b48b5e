"""python -m datalens"""

from datalens.cli.main import main

main()
