"""The suite's budget: CPU seconds of each test, of each file and of the whole, and a table of them at the end.

CPU seconds, of pytest's process and of the processes that a test started and waited for, because wall time on a machine
that does other work besides says little. Even so they grow by a third when the cores are shared, so a file over its
budget is only reported. Two things fail the run: a whole that is over its budget by more than a fifth (`make test` and
`make test-all` have one each; a run of some files stays below it), and a test that is over `LONG_SEC` without a marker
`long` that has a reason.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import PurePath
from typing import Any

import pytest

WHOLE_SEC = {"not slow": 1500.0, "": 5000.0}
"""What follows `-m` -> CPU seconds of the whole: of `make test` and `make test-all`, on the slower of two machines.

The other one takes 519 and 1,559. Lower these numbers whenever a test gets cheaper.
"""
ROOM = 1.2
"""How many times its budget the whole may take, and all files' budgets together may be."""
LONG_SEC = 90.0
"""CPU seconds that a test may take without a reason."""
DEFAULT_SEC = 4.0
"""Budget of a file that is not in `BUDGETS`, in CPU seconds."""
BUDGETS = {
    "test_notebooks.py": 296,
    "test_bench_balance.py": 123,
    "test_bench_balance_check.py": 102,
    "test_agreement.py": 93,
    "test_parity.py": 79,
    "test_plan_processes.py": 73,
    "test_context.py": 85,
    "test_table_cache_processes.py": 67,
    "test_guard.py": 63,
    "test_table_faults_processes.py": 61,
    "test_testing.py": 57,
    "test_chaos.py": 54,
    "test_plan_tables.py": 54,
    "test_search.py": 64,
    "test_search_several.py": 10,
    "test_search_fleet.py": 6,
    "test_lora.py": 52,
    "test_bench_cluster.py": 50,
    "test_recommendation.py": 47,
    "test_agreement_processes.py": 46,
    "test_exchange_state.py": 43,
    "test_loop.py": 43,
    "test_processes.py": 43,
    "test_fleet_kubernetes.py": 45,
    "test_table_cache.py": 43,
    "test_norms.py": 41,
    "test_embedding.py": 40,
    "test_dawnbench.py": 39,
    "test_generate.py": 38,
    "test_texts.py": 25,
    "test_chat.py": 22,
    "test_encoder_tokens.py": 12,
    "test_chat_masks.py": 6,
    "test_conversation_files.py": 6,
    "test_conversations.py": 8,
    "test_lm_eval.py": 75,
    "test_select.py": 37,
    "test_learning_processes.py": 36,
    "test_serve.py": 32,
    "test_serve_requests.py": 24,
    "test_page_browser.py": 40,
    "test_page.py": 8,
    "test_page_access.py": 8,
    "test_measure_gpu.py": 44,
    "test_status_runs.py": 35,
    "test_translate.py": 35,
    "test_exchange_oracle.py": 34,
    "test_photo_processes.py": 34,
    "test_docs.py": 32,
    "test_phases.py": 32,
    "test_attention.py": 34,
    "test_extending.py": 31,
    "test_plan_auto.py": 31,
    "test_planner_experts.py": 15,
    "test_moe_runs.py": 40,
    "test_table_kernels.py": 31,
    "test_imagenet_configs.py": 30,
    "test_resume.py": 30,
    "test_figures.py": 29,
    "test_exchange_misuse.py": 28,
    "test_cluster_start.py": 27,
    "test_checkpoint.py": 26,
    "test_own_models.py": 26,
    "test_precision.py": 26,
    "test_step.py": 26,
    "test_skipped.py": 25,
    "test_trainer.py": 25,
    "test_jagged.py": 23,
    "test_table_kill_processes.py": 23,
    "test_reduce_dtype.py": 22,
    "test_faulty_processes.py": 21,
    "test_models.py": 20,
    "test_quantized.py": 20,
    "test_staleness.py": 20,
    "test_cost.py": 19,
    "test_decoders.py": 19,
    "test_delayed.py": 19,
    "test_learning.py": 19,
    "test_parquet.py": 19,
    "test_sharded_step.py": 19,
    "test_sparse.py": 19,
    "test_auto_processes.py": 18,
    "test_bench_train.py": 18,
    "test_cache.py": 18,
    "test_checkpoint_faults.py": 18,
    "test_init_from.py": 18,
    "test_optim.py": 18,
    "test_select_kernels.py": 18,
    "test_beginnings.py": 17,
    "test_exchange_options.py": 17,
    "test_own_optim.py": 17,
    "test_families_runs.py": 17,
    "test_photos.py": 17,
    "test_update.py": 17,
    "test_bad_inputs_checkpoints.py": 16,
    "test_exchange_edges.py": 16,
    "test_classics.py": 15,
    "test_convert.py": 15,
    "test_convert_images.py": 9,
    "test_image_folder.py": 9,
    "test_labelled_runs.py": 28,
    "test_encoders.py": 6,
    "test_decoder_topk.py": 15,
    "test_encoder_decoder.py": 15,
    "test_image_models.py": 15,
    "test_mixing.py": 15,
    "test_table_traffic.py": 15,
    "test_agreement_values.py": 14,
    "test_asynchrony_launch.py": 14,
    "test_disk.py": 14,
    "test_stacks.py": 14,
    "test_asynchrony_sockets.py": 13,
    "test_batch_norm.py": 13,
    "test_bench_input.py": 13,
    "test_criteo_config.py": 13,
    "test_cross_entropy.py": 13,
    "test_families.py": 13,
    "test_fleet_exchanged.py": 13,
    "test_fleet_slurm_stops.py": 5,
    "test_fleet_slurm.py": 22,
    "test_fleet_slurm_daemons.py": 35,
    "test_sharding.py": 13,
    "test_traffic.py": 13,
    "test_transformer.py": 13,
    "test_callbacks.py": 12,
    "test_exchange.py": 12,
    "test_fit.py": 12,
    "test_freeze.py": 12,
    "test_large_batch.py": 12,
    "test_averaging.py": 11,
    "test_length.py": 11,
    "test_own_loss.py": 11,
    "test_prepare.py": 11,
    "test_axes_read.py": 24,
    "test_score.py": 11,
    "test_tasks.py": 11,
    "test_auto.py": 10,
    "test_bad_tfds.py": 10,
    "test_convert_text.py": 10,
    "test_curves.py": 10,
    "test_differential.py": 10,
    "test_documents.py": 10,
    "test_evaluate_command.py": 10,
    "test_muon.py": 10,
    "test_packing.py": 10,
    "test_scheme.py": 10,
    "test_sharded_optim.py": 10,
    "test_table_runs.py": 20,
    "test_mixed_tables.py": 8,
    "test_table_pieces.py": 10,
    "test_table_search.py": 10,
    "test_workdir.py": 10,
    "test_asynchrony_waiting.py": 9,
    "test_config_mistakes.py": 9,
    "test_hangup.py": 9,
    "test_loader.py": 9,
    "test_schedules.py": 9,
    "test_solver.py": 9,
    "test_bench_select.py": 8,
    "test_benchmarks.py": 14,
    "test_moe.py": 120,
    "test_moe_dispatch.py": 60,
    "test_moe_tuned.py": 40,
    "test_stages.py": 140,
    "test_fp8.py": 60,
    "test_gpu_rules.py": 40,
    "test_data.py": 8,
    "test_mixture.py": 8,
    "test_netns.py": 8,
    "test_sparse_derivatives.py": 8,
    "test_changes.py": 7,
    "test_decoding.py": 7,
    "test_fingerprint.py": 7,
    "test_fleet_damage.py": 7,
    "test_launch_command.py": 7,
    "test_lm_configs.py": 7,
    "test_pairs.py": 7,
    "test_preference_files.py": 6,
    "test_preferences.py": 45,
    "test_exported.py": 40,
    "test_predictor.py": 7,
    "test_spark_jobs.py": 7,
    "test_spark_scoring.py": 10,
    "test_example_weights.py": 27,
    "test_spark_estimators.py": 60,
    "test_early_stopping.py": 9,
    "test_staging.py": 7,
    "test_stand_in.py": 7,
    "test_streams.py": 12,
    "test_image_stream.py": 3,
    "test_text_files.py": 7,
    "test_wire.py": 7,
    "test_arrays_run.py": 6,
    "test_demo.py": 6,
    "test_elementwise.py": 6,
    "test_fleet_processes.py": 6,
    "test_floors.py": 6,
    "test_imports.py": 6,
    "test_jobs.py": 6,
    "test_quantized_traffic.py": 6,
    "test_listeners.py": 6,
    "test_strangers.py": 6,
    "test_trackers.py": 6,
    "test_clicks.py": 5,
    "test_compare.py": 5,
    "test_exchange_kinds.py": 5,
    "test_export_program.py": 3,
    "test_export.py": 5,
    "test_layer_norms.py": 5,
    "test_locale.py": 5,
    "test_packed_rows.py": 5,
    "test_tfds.py": 5,
    "test_kept_models.py": 4,
}
"""Budget of a file in CPU seconds, the slow tests included. The files begin in this order: the longest one first."""


def cpu_seconds() -> float:
    """CPU time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Budget:
    """A pytest plugin: measures on the workers, and reports in the process that the user started.

    `selected` is the run's `-m`.
    """

    def __init__(self, selected: str = "") -> None:
        self._whole_sec = WHOLE_SEC.get(selected)
        self._mark = 0.0
        self._files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._reasons: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Files with a large budget first: with few workers the last file decides how long one of them is idle."""
        items.sort(key=lambda item: -BUDGETS.get(item.path.name, DEFAULT_SEC))
        for item in items:
            marker = item.get_closest_marker("long")
            if marker is not None and not (len(marker.args) == 1 and isinstance(marker.args[0], str)):
                raise pytest.UsageError(f'{item.nodeid}: the marker needs a reason, such as long("trains to the end")')

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        """Starts the clock of a test."""
        self._mark = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Adds the CPU seconds of set-up, call or teardown to its report, which xdist carries to the first process."""
        report = yield
        now = cpu_seconds()
        report.cpu_sec, self._mark = now - self._mark, now
        marker = item.get_closest_marker("long")
        report.long_reason = marker.args[0] if marker else ""
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Sums what the workers measured."""
        file = PurePath(report.nodeid.split("::")[0]).name
        self._files[file][report.nodeid] += getattr(report, "cpu_sec", 0.0)
        if getattr(report, "long_reason", ""):
            self._reasons[report.nodeid] = report.long_reason

    def too_long(self) -> dict[str, float]:
        """Tests over `LONG_SEC` that give no reason, and their CPU seconds."""
        return {
            test: seconds
            for tests in self._files.values()
            for test, seconds in tests.items()
            if seconds > LONG_SEC and test not in self._reasons
        }

    @property
    def total_sec(self) -> float:
        """CPU seconds of all tests."""
        return sum(seconds for tests in self._files.values() for seconds in tests.values())

    @property
    def over_whole(self) -> bool:
        """Whether the whole takes a fifth more than its budget, or more."""
        return self._whole_sec is not None and self.total_sec > ROOM * self._whole_sec

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A whole over its budget, and a test that is long without a reason, fail the run."""
        if (self.over_whole or self.too_long()) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Prints the table, the longest file first."""
        if not self._files:
            return
        write = terminalreporter.write_line
        terminalreporter.section("CPU seconds of each file and its budget")
        write(f"{'file':36}{'tests':>6}{'seconds':>9}{'budget':>8}")
        for file, tests in sorted(self._files.items(), key=lambda entry: -sum(entry[1].values())):
            seconds, budget = sum(tests.values()), BUDGETS.get(file, DEFAULT_SEC)
            write(f"{file:36}{len(tests):6}{seconds:9.1f}{budget:8.0f}{'  over' if seconds > budget else ''}")
        num_tests, whole = sum(map(len, self._files.values())), self._whole_sec
        write(f"{'all':36}{num_tests:6}{self.total_sec:9.1f}{'' if whole is None else f'{whole:8.0f}'}")
        for test, reason in self._reasons.items():
            write(f"long: {test}: {reason}")
        for test, seconds in self.too_long().items():
            write(
                f"error: {test} took {seconds:.0f} CPU seconds, more than {LONG_SEC:.0f}. Make it cheaper, or say why "
                'it may: @pytest.mark.long("the reason")',
                red=True,
            )
        if self.over_whole:
            write(
                f"error: the suite took {self.total_sec:.0f} CPU seconds, more than {ROOM} times its budget of "
                f"{whole:.0f}. What is new needs room: make other tests cheaper (docs/testing.md)",
                red=True,
            )
