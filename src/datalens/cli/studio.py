"""`datalens studio`: a page in the browser, on this machine only."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from datalens.cli.output import show
from datalens.options import Json


@dataclass(frozen=True, kw_only=True)
class StudioCommand:
    """Open a page in the browser, on this machine only, that does the same as the commands."""

    data: Positional[Path]
    """The folder in which your images are. Nothing outside it is shown."""
    out: Path = Path("runs")
    """The folder for runs. Nothing is written elsewhere."""
    port: int = 0
    """Port of this machine; 0: a free one."""
    no_browser: bool = False
    """Print the address, and open no browser."""
    json: Json = False

    def __call__(self) -> int:
        from datalens.studio.server import open_studio

        with open_studio(self.data, self.out, port=self.port) as server:
            address = server.new_address()
            line = f"The studio, for this machine only (the address works once; Ctrl-C ends the studio): {address}"
            show({"address": address, "out": str(self.out)}, [line], json=self.json)
            if not self.no_browser:
                webbrowser.open(address)
            server.serve_forever()
        return 0
