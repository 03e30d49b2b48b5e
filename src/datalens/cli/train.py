"""`datalens train`: its options are `options.TrainOptions`."""

from datalens.cli.output import EXIT_INTERRUPTED, show
from datalens.options import TrainOptions


def train(command: TrainOptions, given: set[str]) -> int:
    from datalens.driver import train as run

    result = run(command, given)
    if not result:  # another rank leads, and says it
        return 0
    show(result, [f"{result['run']}/release"], json=command.json)
    return EXIT_INTERRUPTED if result["interrupted"] else 0
