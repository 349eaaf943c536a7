"""The contract on 1 to 4 real ranks: torch's under every MPI, the other frameworks' under one."""

from __future__ import annotations

import pytest

# What frameworks differ in lies above the engine, and the MPI below it: one binary serves all.
# So in the gate torch's two ranks meet under the second MPI, the others' under the first; on one
# rank the contract runs without MPI, and threads stand for three ranks and more.
OTHER_FRAMEWORKS = "tensorflow or keras or jax or numpy"
# Files without a test for it, which would import the other frameworks.
TORCH_ALONE = ("--ignore-glob=*/test_tensorflow*", "--ignore-glob=*/test_jax*")
OTHERS_ALONE = ("--ignore-glob=*/test_tensorflow*", "--ignore-glob=*/test_torch*")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.gate(mpi=2)), 3, 4])
def test_contract_holds_on_real_ranks(run_suite, python, ranks):
    run_suite(ranks, "tests/contract", "-k", f"not ({OTHER_FRAMEWORKS})", *TORCH_ALONE)


# The kernels' twin takes torch's tensors in the host's memory for a device's.
IN_GATE = [
    f"tests/contract/test_{n}.py" for n in ("torch_device", "collectives", "torch_gradients")
]


@pytest.mark.gate
@pytest.mark.one_mpi
def test_contract_holds_on_a_device(run_suite, python, twin):
    fast = f"not ({OTHER_FRAMEWORKS} or learns)"
    run_suite(2, *IN_GATE, "-k", fast, QSGD_GPU_LIBRARY=str(twin), QSGD_NCCL=str(twin))


@pytest.mark.one_mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_of_the_contract_holds_on_a_device(run_suite, python, twin, ranks):
    # A kernel's threads take turns on the CPU, which needs its time.
    options = ("-k", f"not ({OTHER_FRAMEWORKS})", *TORCH_ALONE, "--timeout", "600")
    nccl = str(twin) if ranks % 2 == 0 else "none"
    run_suite(ranks, "tests/contract", *options, QSGD_GPU_LIBRARY=str(twin), QSGD_NCCL=nccl)


@pytest.mark.one_mpi
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_contract_of_arrays_holds_on_a_device(run_suite, python, twin, ranks):
    """With arrays of numpy and JAX in the host's memory, inside jit and outside."""
    options = ("-k", "jax or numpy or test_arrays", *OTHERS_ALONE, "--timeout", "600")
    run_suite(ranks, "tests/contract", *options, QSGD_GPU_LIBRARY=str(twin), JAX_PLATFORMS="cpu")


# On one rank the gate runs all types, in every framework; on two, float32 and booleans.
SOME_TYPES = "not (float16 or float64 or int8 or int16 or int32 or int64)"
# ... and there what runs eagerly, too; on two ranks, what is compiled.
EAGER = "[jax] or [jax- or [tensorflow] or [tensorflow-"
# What takes seconds to compile, and differs from another test in options alone.
ALIKE = (
    "(jax_optimizer and (eager or options1 or options2 or depends_on or add_up))"
    " or (test_tensorflow_graphs and every_optimizer and not Adam])"
)
# Keras's own tests compile a model each.
IN_KERAS = "warmup or metrics_are or begins_alike or dropout or compiled-SGD or identical[qsgd]"
OF_KERAS = f"(test_optimizer.py or test_callbacks.py) and not ({IN_KERAS})"
# JAX's programs run once: to optimise them takes longer.
QUICK_XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@pytest.mark.gate
@pytest.mark.one_mpi
def test_contract_holds_for_the_other_frameworks(run_suite, python):
    words = f"({OTHER_FRAMEWORKS}) and {SOME_TYPES} and not ({EAGER} or {ALIKE} or ({OF_KERAS}))"
    options = ("tests/keras", "-k", words, "--ignore-glob=*/test_torch*")
    run_suite(2, "tests/contract", *options, XLA_FLAGS=QUICK_XLA)


@pytest.mark.one_mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_of_the_contract_holds_for_the_other_frameworks(run_suite, python, ranks):
    run_suite(ranks, "tests/contract", "-k", OTHER_FRAMEWORKS, "--ignore-glob=*/test_torch*")


@pytest.mark.gate
def test_nodes_may_be_simulated(run_ranks, python, tmp_path):
    script = tmp_path / "facts.py"
    script.write_text(
        "import qsgd_hpc.arrays as hvd\n"
        "hvd.init()\n"
        "print('facts', hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(),"
        " hvd.cross_size(), flush=True)\n"
    )
    done = run_ranks(4, "--ranks-per-node", "2", python, str(script))
    facts = sorted(line for line in done.stdout.splitlines() if line.startswith("facts"))
    assert facts == ["facts 0 0 2 0 2", "facts 1 1 2 0 2", "facts 2 0 2 1 2", "facts 3 1 2 1 2"]
