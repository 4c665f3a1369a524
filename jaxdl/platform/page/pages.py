"""The pages, and the JSON by which they stay up to date."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxdl.core.files import CONFIG_FILE, EXAMPLES_FILE, METRICS_FILE, RESULT_FILE, SEARCH_FILE
from jaxdl.platform.page import fleets
from jaxdl.platform.page.access import Access
from jaxdl.platform.page.details import as_text, read_details, read_picture
from jaxdl.platform.page.files import Unreadable, signature
from jaxdl.platform.page.listing import SIZES, Query, as_data, list_runs
from jaxdl.platform.page.logs import Log, find_logs, tail
from jaxdl.platform.page.render import as_html, as_json, render
from jaxdl.platform.page.runs import GROUPS, Run, Runs, Snapshot, as_shown
from jaxdl.platform.page.searches import Searches
from jaxdl.platform.page.series import MOST_POINTS, AllSeries, curves_as_json, panels
from jaxdl.report.compare.curves import By, Curves, config_differences, short_names

MOST_COMPARED = 16
"""Runs that are compared at once."""
_FEWEST_POINTS, _ALL_POINTS = 250, 6_000
_MOST_TRIALS_DATA = 1_000


class Pages:
    """Answers the requests of those who may look."""

    def __init__(self, given: Sequence[str], access: Access, metrics: Sequence[str]) -> None:
        self.runs = Runs(given)
        self._given, self._access, self._metrics = [as_shown(name) for name in given], access, list(metrics)
        self._series, self._searches = AllSeries(), Searches()

    # Every page has these.

    def _page(self, request: Request, template: str, snapshot: Snapshot, **values: Any) -> Response:
        common = {
            "fleets": _named(snapshot.found.fleets),
            "searches": _named(snapshot.found.searches),
            "may_act": self._access.may_act(request),
            "has_tokens": self._access.has_tokens,
            "groups": GROUPS,
        }
        return as_html(render(template, **common, **values))

    def _run(self, request: Request) -> tuple[Run, Snapshot]:
        snapshot = self.runs.snapshot()
        run = snapshot.runs.get(request.path_params["id"])
        if run is None:
            raise HTTPException(404, "There is no such run in the folders of this page, or no longer.")
        return run, snapshot

    # The table.

    def index(self, request: Request) -> Response:
        """The table of runs."""
        snapshot, query = self.runs.snapshot(), Query.of(request.query_params)
        values = self._table(snapshot, query)
        return self._page(request, "runs.html", snapshot, given=self._given, sizes=SIZES, **values)

    def _table(self, snapshot: Snapshot, query: Query) -> dict[str, Any]:
        listing = list_runs(list(snapshot.runs.values()), query, self._metrics)
        rows = [as_data(run) for run in listing.runs]
        about = {"all": len(snapshot.runs), "left_out": snapshot.found.left_out}
        return {"query": query, "listing": listing, "rows": rows, "now": snapshot.at, **about}

    def runs_data(self, request: Request) -> Response:
        """The runs of one page of the table, and its parts as HTML."""
        snapshot, query = self.runs.snapshot(), Query.of(request.query_params)
        values = self._table(snapshot, query)
        listing, data = values["listing"], {name: values[name] for name in ("rows", "all", "left_out")}
        data |= {"total": listing.total, "counts": dict(listing.counts), "page": listing.page, "pages": listing.pages}

        def make() -> dict[str, Any]:
            names = ("rows", "counts", "paging")
            return data | {"parts": {name: render(f"part_{name}.html", groups=GROUPS, **values) for name in names}}

        return as_json(request, [data, list(listing.metrics), repr(query)], make)

    # One run.

    def run(self, request: Request) -> Response:
        """The page of a run."""
        run, snapshot = self._run(request)
        return self._page(request, "run.html", snapshot, **self._about(run, snapshot))

    def _about(self, run: Run, snapshot: Snapshot) -> dict[str, Any]:
        series = self._series.of(run.path)
        details = read_details(run.path, series.config)
        logs = self._logs(run, snapshot)
        folder, _, name = run.name.rpartition("/")
        events = [
            {"step": row["step"], "kind": as_text(row.get("kind") or ""), "text": as_text(row["event"])}
            for row in series.events[::-1]
        ]
        return {
            "run": run,
            "row": as_data(run),
            "details": details,
            "problems": [*series.problems, *details.problems],
            "events": events,
            "logs": [log.label for log in logs],
            "title": name or run.name,
            "folder": folder,
            "now": snapshot.at,
        }

    def run_data(self, request: Request) -> Response:
        """A run, and the parts of its page as HTML."""
        run, snapshot = self._run(request)
        about = self._about(run, snapshot)
        values = about | {"may_act": self._access.may_act(request), "has_tokens": self._access.has_tokens}
        version = [
            about["row"],
            values["may_act"],
            about["problems"],
            about["events"],
            about["logs"],
            repr(about["details"]),
        ]

        def make() -> dict[str, Any]:
            names = ("state", "facts", "events", "failures", "pictures", "checkpoints")
            return about["row"] | {"parts": {name: render(f"part_{name}.html", **values) for name in names}}

        return as_json(request, version, make)

    def _logs(self, run: Run, snapshot: Snapshot) -> list[Log]:
        of_fleets = fleets.runs_of(list(snapshot.found.fleets.values())).get(run.id, [])
        return find_logs(run.path, of_fleets, is_trial=bool(run.search))

    def log_data(self, request: Request) -> Response:
        """The end of one of the logs of a run."""
        run, snapshot = self._run(request)
        logs = self._logs(run, snapshot)
        label = request.query_params.get("name") or (logs[0].label if logs else "")
        log = next((log for log in logs if log.label == label), None)
        if log is None:
            raise HTTPException(404, "There is no such log of this run.")
        version = [label, signature(log.path)]

        def make() -> dict[str, Any]:
            try:
                end = tail(log)
            except (Unreadable, FileNotFoundError) as error:
                return {"name": label, "text": "", "problem": str(error) or "it is gone", "size": 0, "start": 0}
            return {"name": label, "text": end.text, "problem": "", "size": end.size, "start": end.start}

        return as_json(request, version, make)

    def picture_of_run(self, request: Request) -> Response:
        """A PNG file of a workdir."""
        return _picture(self._run(request)[0].path, request.path_params["name"])

    # Curves, of one run or several.

    def _chosen(self, request: Request) -> tuple[list[Run], Snapshot]:
        snapshot = self.runs.snapshot()
        ids = list(dict.fromkeys(request.query_params.getlist("run")))
        runs = [snapshot.runs[run_id] for run_id in ids if run_id in snapshot.runs]
        if len(ids) > MOST_COMPARED:
            raise HTTPException(400, f"At most {MOST_COMPARED} runs are compared at once; these are {len(ids)}.")
        if not runs:
            raise HTTPException(404, "There are no such runs in the folders of this page, or no longer.")
        return runs, snapshot

    def curves_data(self, request: Request) -> Response:
        """The curves of runs: of the metrics that matter most, or with `all=1` of each."""
        runs, _ = self._chosen(request)
        given = request.query_params.get("by", "step")
        by: By = given if given in typing.get_args(By) else "step"  # pyright: ignore[reportAssignmentType]
        every = request.query_params.get("all") == "1"
        files = [[signature(run.path / name) for name in (METRICS_FILE, CONFIG_FILE, EXAMPLES_FILE)] for run in runs]

        def make() -> dict[str, Any]:
            series = [self._series.of(run.path) for run in runs]
            names = {name for of_run in series for row in of_run.curves.rows for name in row} - {"step", "epoch"}
            shown = [panel for panel in panels(sorted(names)) if every or panel["main"]]
            wanted = [name for panel in shown for name in panel["metrics"]]
            most = max(_FEWEST_POINTS, min(MOST_POINTS, _ALL_POINTS // len(runs)))
            of_runs = [curves_as_json(of_run, by, wanted, most) for of_run in series]
            drawn = {name for of_run in of_runs for name in of_run["metrics"]}
            labels = map(as_shown, short_names([run.path for run in runs]))
            return {
                "runs": [
                    {"id": run.id, "name": label} | data for run, label, data in zip(runs, labels, of_runs, strict=True)
                ],
                "panels": [
                    {**panel, "metrics": kept, "title": as_shown(panel["title"])}
                    for panel in shown
                    if (kept := [name for name in panel["metrics"] if name in drawn])
                ],
                "more": len(panels(sorted(names))) - len(shown),
                "by": by,
            }

        return as_json(request, [files, [run.id for run in runs], by, every], make)

    def compare(self, request: Request) -> Response:
        """The page that compares runs."""
        if not request.query_params.getlist("run"):
            raise HTTPException(400, "Choose runs in the table first: tick their boxes, then press Compare.")
        runs, snapshot = self._chosen(request)
        series = [self._series.of(run.path) for run in runs]
        names = list(map(as_shown, short_names([run.path for run in runs])))
        curves = [of_run.curves for of_run in series]
        differing = {
            as_shown(name): ["" if value is None else as_text(value) for value in values]
            for name, values in config_differences(curves).items()
        }
        problems = [
            f"{name}: {problem}" for name, of_run in zip(names, series, strict=True) for problem in of_run.problems
        ]
        return self._page(
            request, "compare.html", snapshot, runs=runs, names=names, rows=[as_data(run) for run in runs],
            differing=differing, table=_values(curves), problems=problems, now=snapshot.at,
            missing=len(set(request.query_params.getlist("run"))) - len(runs),
        )  # fmt: skip

    # Fleets and searches.

    def _fleet(self, request: Request) -> tuple[Path, Snapshot]:
        snapshot = self.runs.snapshot()
        folder = snapshot.found.fleets.get(request.path_params["id"])
        if folder is None:
            raise HTTPException(404, "There is no such fleet in the folders of this page, or no longer.")
        return folder, snapshot

    def _about_fleet(self, request: Request) -> tuple[dict[str, Any], Snapshot]:
        folder, snapshot = self._fleet(request)
        about = {
            "fleet": fleets.read_fleet(folder),
            "fleet_id": request.path_params["id"],
            "name": as_shown(str(folder)),
            "runs": snapshot.runs,
            "rows": {run.id: as_data(run) for run in snapshot.runs.values()},
            "now": snapshot.at,
        }
        return about, snapshot

    def fleet(self, request: Request) -> Response:
        """The page of a fleet."""
        about, snapshot = self._about_fleet(request)
        return self._page(request, "fleet.html", snapshot, **about)

    def fleet_data(self, request: Request) -> Response:
        """The page of a fleet as HTML, when it has changed."""
        about, _ = self._about_fleet(request)
        may_act = self._access.may_act(request)
        steps = [[run["id"], about["rows"].get(run["id"])] for run in about["fleet"].runs]

        def make() -> dict[str, Any]:
            return {"parts": {"fleet": render("part_fleet.html", **about, may_act=may_act)}}

        return as_json(request, [repr(about["fleet"]), steps, may_act], make)

    def _about_search(self, request: Request) -> tuple[dict[str, Any], Snapshot]:
        snapshot, search_id = self.runs.snapshot(), request.path_params["id"]
        folder = snapshot.found.searches.get(search_id)
        if folder is None:
            raise HTTPException(404, "There is no such search in the folders of this page, or no longer.")
        trials = [run for run in snapshot.runs.values() if run.search == search_id]
        search = self._searches.read(folder, trials)
        about = {
            "search": search,
            "search_id": search_id,
            "name": as_shown(str(folder)),
            "rows": {run.id: as_data(run) for run in trials},
            "now": snapshot.at,
        }
        return about, snapshot

    def search(self, request: Request) -> Response:
        """The page of a search."""
        about, snapshot = self._about_search(request)
        return self._page(request, "search.html", snapshot, **about)

    def search_data(self, request: Request) -> Response:
        """The page of a search as HTML, when it has changed."""
        about, snapshot = self._about_search(request)
        folder = snapshot.found.searches[about["search_id"]]
        version = [about["rows"], [signature(folder / name) for name in (RESULT_FILE, SEARCH_FILE)]]
        version += [about["search"].pictures]

        def make() -> dict[str, Any]:
            return {"parts": {"search": render("part_search.html", **about)}}

        return as_json(request, version, make)

    def picture_of_search(self, request: Request) -> Response:
        """A PNG file of the report of a search."""
        folder = self.runs.snapshot().found.searches.get(request.path_params["id"])
        if folder is None:
            raise HTTPException(404, "There is no such search in the folders of this page, or no longer.")
        return _picture(folder, request.path_params["name"])


def _named(folders: Mapping[str, Path]) -> list[tuple[str, str]]:
    return [(folder_id, as_shown(str(path))) for folder_id, path in folders.items()]


def _picture(folder: Path, name: str) -> Response:
    try:
        content = read_picture(folder, name)
    except FileNotFoundError:
        raise HTTPException(404, "There is no such picture.") from None
    except Unreadable as error:
        raise HTTPException(404, f"The picture is not shown: {error}.") from None
    return Response(content, 200, {"Cache-Control": "private, no-cache"}, "image/png")


def _values(runs: Sequence[Curves]) -> list[tuple[str, list[tuple[Any, Any]]]]:
    """(metric, (last, best) in each run) of the training loss and the evaluations."""
    names = {name for run in runs for row in run.rows for name in row if name.startswith(("train/loss", "eval/"))}
    table = []
    for name in sorted(names, key=lambda name: (not name.endswith("/loss"), name)):
        values = []
        for run in runs:
            try:
                values.append((run.last(name), run.best(name)))
            except (ValueError, TypeError, OverflowError):
                values.append((None, None))
        table.append((as_shown(name), values))
    return table
