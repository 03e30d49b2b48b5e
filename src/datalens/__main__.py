"""python -m datalens"""

from datalens.cli import main

main()
