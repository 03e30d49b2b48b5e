"""`datalens plan`: what `datalens train` would do, and what it would cost."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from datalens.cli.output import show
from datalens.cli.train import asked
from datalens.errors import DatalensError
from datalens.options import BudgetOptions, DataOptions, Json, MethodOptions, PriceOptions

if TYPE_CHECKING:
    from datalens.public.theorem6 import Suggestion


@dataclass(frozen=True, kw_only=True)
class Plan(PriceOptions, MethodOptions, BudgetOptions, DataOptions):
    """Show what `train` would do and cost. No image of your own data is read but the first, for its size.

    Each method has options of its own: `datalens plan --method NAME --help`.
    """

    details: bool = False
    """Also show every release with its noise, and every setting."""
    json: Json = False

    def run(self, given: set[str]) -> int:
        from datalens.data import formats
        from datalens.data.own.reading import Reading
        from datalens.data.records import check_fixed_positions
        from datalens.evaluate.inspection import OWNER_ONLY, judged_files
        from datalens.plans.guidance import read_off_warnings, warnings, worth
        from datalens.plans.registry import make_plan
        from datalens.privacy.ledger import json_number
        from datalens.progress import duration

        if self.data is None:
            raise DatalensError("name the data: --data mnist, for example; `datalens data list` shows what there is")
        schema, records = formats.schema_and_records(
            self.data, nominal_size=self.nominal_size, folder=self.data_folder, reading=Reading.of(self)
        )
        budget, settings = make_plan(asked(self, given), schema)
        if getattr(settings, "shares", None) == "balanced" and records is not None:
            check_fixed_positions(records)
        parts = settings.costs(schema, budget)
        expected = settings.expect(schema, budget)
        warned = warnings(budget, schema, settings) + read_off_warnings(schema)
        suggested, seconds = settings.suggestion(), settings.seconds(schema)
        judged = [] if records is None else judged_files(settings, schema, budget, records)
        whose = " and the person" if schema.by_person else ""
        counted = f"; and for the part above, the class{whose} of every image" if judged else ""
        stamp = "" if math.isfinite(budget.epsilon) else " NOT PRIVATE: no noise, and no guarantee."
        lines = [
            f"{settings.method} [{settings.preset}] on {schema.name}, {settings.planned_as()}.",
            *(f"expect: {line}" for line in expected),
            f"cost: {budget.describe(budget.epsilon)}, for one {schema.record_unit}.{stamp} {worth(budget.epsilon)}",
            *([] if seconds is None else [f"time: about {duration(seconds)} on this CPU, by a timed part"]),
            *(judged and [f"THIS PART IS {OWNER_ONLY}:", *(f"  {line}" for line in judged)]),
            *([_advice(suggested, getattr(settings, "k", 0))] if suggested else ()),
            *(f"warning: {line}" for line in warned),
            f"read from the data: {'nothing' if records is None else formats.looked_at(records)}{counted}.",
        ]
        lines += (
            ["--details shows every release with its noise, and every setting."]
            if not self.details
            else [
                "",
                f"{'release':24} {'of the budget':>13} {'cells':>9} {'sensitivity':>12} {'sigma':>12} "
                f"{'noise/signal':>13}",
                *(
                    f"{part['release']:24} {part['share']:13.1%} {part['cells']:9} {part['sensitivity']:12.6g} "
                    f"{part['sigma']:12.6g} {part['noise_to_signal']:13.2g}"
                    for part in parts
                ),
                "",
                f"noise/signal: {settings.signal}",
                "",
                *(f"{name} = {value}" for name, value in settings.as_dict().items()),
            ]
        )
        parts = [{n: json_number(v) if isinstance(v, float) else v for n, v in part.items()} for part in parts]
        fields: dict[str, Any] = {"budget": budget.as_dict(), "settings": settings.as_dict(), "parts": parts}
        fields |= {"public": schema.as_dict(), "expect": expected, "warnings": warned}
        if suggested:
            fields["suggested"] = suggested.as_dict()
        if seconds is not None:
            fields["seconds"] = round(seconds, 1)
        if judged:
            fields["for_the_owner_only"] = {"classes": judged, "note": OWNER_ONLY}
        show(fields, lines, json=self.json)
        return 0


def _advice(best: "Suggestion", k: int) -> str:
    """Return the k that Theorem 6 suggests, as a sentence. It is advice: the plan keeps the k that was asked for."""
    return (
        f"suggestion: --k {best.k} (here {k}): it minimises the bound of Theorem 6, with a bias of {best.bias:.2g} "
        f"and noise of {best.noise:.2g} squared gradients, for gradients of Weibull shape {best.shape:g} "
        "(docs/theory.md)"
    )
