"""The GPU session against the CPU session of the same bundle, on a stand-in for driver and engine; and on a card."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from engine_support import relative_error, rows
from gpu_stand_in import OUT_OF_MEMORY, StandInDriver, StandInEngine, StandInTensorRt, view
from gpu_support import gpu_bundle

from clover.engines.bundle import Bundle
from clover.engines.gpu_driver import DetectedGpu
from clover.engines.open import open_session
from clover.engines.tensorrt.open import open_gpu_session
from clover.runtime.errors import BundleError, CloverError, RequestError
from clover.runtime.gpu import tensors
from clover.runtime.gpu.device import Device
from clover.runtime.gpu.session import GpuSession
from clover.runtime.session import Adjustment, Candidates, SequenceRows, StepSession

trt = pytest.importorskip("tensorrt_rtx", reason="needs tensorrt-rtx-cu13")
pytest.importorskip("triton", reason="compiling the kernels needs triton")

CARD = DetectedGpu(0, "NVIDIA GeForce RTX 5070 Ti", 120, 16 * 2**30, 896.0)
SEQUENCES = 3


class Machine:
    """A bundle opened on a stand-in card."""

    def __init__(self, bundle: Bundle, *, card_bytes: int = 2**30, **options: Any) -> None:
        self.bundle = bundle
        self.driver = StandInDriver(card_bytes)
        self.trt = StandInTensorRt(trt, bundle, self.driver, tensors.BFLOAT16)
        stand_ins = {"driver": self.driver, "trt": self.trt, "cards": [CARD]}
        session = open_gpu_session(bundle, stand_ins=stand_ins, **options)
        assert isinstance(session, GpuSession)
        self.session = session


def float_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of float32, on the stand-in as in the session; the real engine's record then differs from both."""
    monkeypatch.setattr("clover.runtime.gpu.tensors.BFLOAT16", np.dtype(np.float32))
    monkeypatch.setattr("clover.engines.tensorrt.checks._tensors", lambda bundle: "")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Sequences enough for a batch, and float32 caches, so that both sessions compute the same."""
    float_caches(monkeypatch)
    opened = Machine(bundle(), sequences=SEQUENCES)
    yield opened
    opened.session.close()
    assert not opened.driver.memory, "everything allocated is freed again"


def bundle() -> Bundle:
    return gpu_bundle("5070ti", "bf16", sequences=SEQUENCES, with_logits=True)


def cpu() -> StepSession:
    return open_session(bundle(), provider="cpu", sequences=SEQUENCES, threads=1, cache=False)


def tokens(seed: int, count: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).integers(4, 700, count)


def agree(got: Candidates, want: Candidates) -> None:
    assert got.logits is not None and want.logits is not None
    assert np.linalg.norm(got.logits - want.logits) <= 1e-4 * np.linalg.norm(want.logits)
    assert (got.ids[:, 0] == want.ids[:, 0]).all()
    np.testing.assert_allclose(got.logprobs[:, 0], want.logprobs[:, 0], atol=1e-3)


def both(a: StepSession, b: StepSession, plans: list[SequenceRows], candidates: int = 1) -> None:
    """One step on both sessions, with equal results and positions."""
    for got, want in zip(a.step(plans, candidates), b.step(plans, candidates), strict=True):
        agree(got, want)
        assert got.ids.shape == want.ids.shape
    assert [a.position(s) for s in range(SEQUENCES)] == [b.position(s) for s in range(SEQUENCES)]


def test_a_conversation_equals_the_cpu_session(machine: Machine) -> None:
    """Prefill, previews of two block sizes, commit with preview, one row at a time: every shape of step, twice."""
    gpu, host = machine.session, cpu()
    full, masked = tokens(1, 32), np.full(32, 3)
    for round in range(2):
        for plan in (
            rows(tokens(round, 45), 45),  # a prompt of no round length
            rows(masked, 0),
            rows(np.concatenate([full, masked]), 32),
            rows(tokens(7, 16), 0),
            rows([5], 1),
            rows([9], 1),
        ):
            both(gpu, host, [plan], 4)
        gpu.reset(0)
        host.reset(0)
    assert machine.driver.log.count("cuGraphLaunch") >= 8, "a shape that came before runs as a graph"
    # 45 rows are padded to 64, two blocks: the decode profile; a longer chunk takes the other
    assert set(machine.trt.engine.profiles_run) == {0}
    both(gpu, host, [rows(tokens(3, 100), 100, logits=False)])
    assert machine.trt.engine.profiles_run[-1] == 1


def test_sequences_of_different_progress_equal_the_cpu_session(machine: Machine) -> None:
    gpu, host = machine.session, cpu()
    for session in (gpu, host):
        session.step([rows(tokens(s, n), n, slot=s) for s, n in enumerate((40, 7, 19))])
    mixed = [
        rows(np.full(32, 3), 0, slot=0, top_p=0.5),
        rows(np.concatenate([tokens(5, 16), np.full(16, 3)]), 16, slot=1),
        rows(tokens(6, 3), 3, slot=2),
    ]
    both(gpu, host, mixed)
    both(gpu, host, [mixed[2]])  # the others stay as they are
    both(gpu, host, mixed)


def test_adjusted_logits_choose_the_same_candidates(machine: Machine) -> None:
    gpu, host = machine.session, cpu()
    change = Adjustment(
        np.array([5, 9, 700]), np.array([1.3, 2.0, 1.0], np.float32), np.array([-0.9, 0.0, 30.0], np.float32)
    )
    plan = SequenceRows(0, tokens(2, 20), 20, np.array([3, 19]), change)
    both(gpu, host, [plan], 20)
    assert gpu.step([SequenceRows(0, tokens(2, 4), 0, np.arange(4), change)])[0].ids[:, 0].tolist() == [700] * 4


def test_snapshots_and_tentative_commits_come_back_bit_for_bit(machine: Machine) -> None:
    gpu, host = machine.session, cpu()
    for session in (gpu, host):
        session.step([rows(tokens(1, 30), 30, slot=1)])
    snapshot = gpu.snapshot(1)
    tentative = SequenceRows(1, tokens(8, 16), 16, np.arange(16), tentative=True)
    both(gpu, host, [tentative])
    kept = gpu.snapshot(1)
    assert kept.before is not None and kept.before.position == 30
    undo = SequenceRows(1, tokens(9, 4), 4, np.arange(4), undo=True)
    both(gpu, host, [undo])
    gpu.restore(2, snapshot)  # another slot
    again = gpu.snapshot(2)
    assert again.position == 30
    assert all(np.array_equal(again.tensors[n], t) for n, t in snapshot.tensors.items())
    gpu.restore(0, kept)  # the tentative commit can still be taken back there
    gpu.step([SequenceRows(0, tokens(9, 4), 4, np.arange(4), undo=True)])
    mine, other = gpu.snapshot(0), gpu.snapshot(1)
    assert all(np.array_equal(mine.tensors[n], t) for n, t in other.tensors.items())
    with pytest.raises(ValueError, match="not tentative"):
        gpu.step([undo])
    with pytest.raises(ValueError, match="another model"):
        gpu.restore(0, host_snapshot_without_a_layer(snapshot))


def host_snapshot_without_a_layer(snapshot: Any) -> Any:
    from dataclasses import replace

    return replace(snapshot, tensors={n: t for n, t in snapshot.tensors.items() if n != "conv.0"})


@pytest.mark.parametrize("precision", ["bf16", "int4"])
def test_experts_lie_where_the_table_says_before_and_after_they_move(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """On a card too small for all experts, the most used come onto it, and every address keeps its expert's bytes."""
    monkeypatch.setattr("clover.engines.tensorrt.open.RESERVE", 0)
    built = gpu_bundle("5070ti", precision, **({} if precision == "int4" else {"sequences": 3, "with_logits": True}))
    (entry,) = built.manifest.engines
    limited = built.manifest.model_copy(update={"engines": (entry.model_copy(update={"resident_experts": 16}),)})
    machine = Machine(Bundle(built.directory, limited))
    session, store = machine.session, machine.session._experts
    assert store.host_experts == 64 - 16
    card = (store._card.address, store._card.address + store._card.nbytes)

    def check() -> npt.NDArray[np.bool_]:
        on_card = np.zeros((4, 16), np.bool_)
        wanted = np.empty(store._weights.layout.nbytes, np.uint8)
        for layer, table in enumerate(machine.trt.engine.tables):
            for expert in range(16):
                store._weights.read(layer, expert, wanted)
                for part, (offset, nbytes) in enumerate(store._weights.layout.parts):
                    address = int(table[part, expert])
                    assert (address != 0) == (nbytes > 0) and address % 16 == 0
                    if nbytes:
                        assert np.array_equal(view(address, np.uint8, (nbytes,)), wanted[offset : offset + nbytes])
                on_card[layer, expert] = card[0] <= int(table[0, expert]) < card[1]
        return on_card

    session.step([rows(tokens(0, 8), 8)])
    assert check().sum() == 16
    for _ in range(100):
        session.step([rows(tokens(0, 1), 1)])
    after = check()
    assert after[:, -4:].all() and after.sum() == 16, "the experts in use are on the card"
    session.close()


def test_int4_scales_lose_nothing_on_the_card() -> None:
    built = gpu_bundle("5070ti", "int4")
    from safetensors.numpy import load_file

    stored = load_file(built.directory / "weights" / "experts.safetensors")
    for name, scales in stored.items():
        if name.endswith("scales"):
            assert np.array_equal(scales.astype(ml_dtypes.bfloat16).astype(np.float32), scales), name


def test_a_session_may_be_used_from_another_thread(machine: Machine) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def use() -> list[int]:
        machine.session.step([rows(tokens(0, 20), 20)])
        machine.session.restore(1, machine.session.snapshot(0))
        machine.session.reset(0)
        return [machine.session.position(s) for s in range(2)]

    with ThreadPoolExecutor(1) as other:
        assert other.submit(use).result() == [0, 20]


def test_without_graphs_a_step_gives_the_same(machine: Machine) -> None:
    machine.trt.engine.capturable = False
    host = cpu()
    for plan in (rows(tokens(0, 20), 20), rows([5], 1), rows([6], 1), rows(tokens(1, 16), 0), rows([7], 1)):
        both(machine.session, host, [plan])
    assert "cuGraphLaunch" not in machine.driver.log


def test_compiled_kernels_are_kept_for_the_next_process() -> None:
    for _ in range(2):
        Machine(bundle()).session.close()
    (kept,) = (bundle().directory / ".cache").glob("tensorrt-rtx-*.bin")
    assert kept.read_bytes().startswith(b"kernelskernels"), "the second process began with the first one's"


def test_what_the_engine_was_not_built_for_is_refused_by_name(machine: Machine) -> None:
    with pytest.raises(RequestError, match="logit_rows"):
        machine.session.step([rows(tokens(0, 100), 100)])  # logits of 100 rows
    with pytest.raises(RequestError, match=r"sequences is 9 .*--sequences 9"):
        Machine(bundle(), sequences=9)


def test_a_card_too_small_for_the_state_is_one_sentence() -> None:
    with pytest.raises(CloverError, match="memory is full"):
        Machine(bundle(), sequences=3, card_bytes=2**16)


def test_an_engine_that_does_not_open_is_one_sentence() -> None:
    opened = StandInTensorRt(trt, bundle(), StandInDriver(), np.float32)
    opened.opens = False
    with pytest.raises(BundleError, match="can't be opened on this card"):
        open_gpu_session(bundle(), stand_ins={"driver": StandInDriver(), "trt": opened, "cards": [CARD]})
    Machine(bundle()).session.close()  # and the plugins are free to be registered again


def test_shapes_that_do_not_fit_together_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the shape used longest ago makes room for the next; nothing is lost, and nothing left behind."""
    float_caches(monkeypatch)
    monkeypatch.setattr("clover.engines.tensorrt.open.RESERVE", 2**20)
    plans = [rows(tokens(n, n), n) for n in (100, 32, 200)] * 2

    def run(card_bytes: int) -> tuple[int, int, int]:
        """Bytes before the first step, and most of any later moment; shapes kept."""
        opened, host = Machine(bundle(), sequences=1, card_bytes=card_bytes), cpu()
        session, driver = opened.session, opened.driver
        before, most = sum(driver.on_card.values()), 0
        for plan in plans:
            session.reset(0)
            host.reset(0)
            agree(session.step([plan_with_logits(plan)])[0], host.step([plan_with_logits(plan)])[0])
            most = max(most, sum(driver.on_card.values()))
        kept = len(session._prepared)
        session.close()
        assert not driver.memory
        return before, most, kept

    before, most, kept = run(2**30)
    assert kept == 3
    monkeypatch.setattr(
        StandInDriver, "cuMemAlloc", limited(StandInDriver.cuMemAlloc, before + (most - before) * 2 // 3)
    )
    assert run(2**30)[2] < 3


def plan_with_logits(plan: SequenceRows) -> SequenceRows:
    return SequenceRows(plan.slot, plan.tokens, plan.commit, np.arange(4))


def limited(allocate: Any, limit: int) -> Any:
    """cuMemAlloc of a card on which other programs leave `limit` bytes."""

    def cuMemAlloc(self: StandInDriver, nbytes: int) -> tuple[int, int]:
        full = sum(self.on_card.values()) + nbytes > limit
        return (OUT_OF_MEMORY, 0) if full else allocate(self, nbytes)

    return cuMemAlloc


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda e: {"get_tensor_dtype": lambda n: SimpleNamespace(name="HALF")}, r"is HALF .* binds"),
        (lambda e: {"get_tensor_shape": lambda n: (7,)}, r"\[7\], and this clover binds"),
        (lambda e: {"num_io_tensors": 5}, "the engine lacks"),
        (lambda e: {"get_tensor_location": lambda n: None}, "in other memory than this clover"),
    ],
    ids=["type", "shape", "missing", "place"],
)
def test_an_engine_with_other_tensors_is_refused_before_a_step_writes_over_memory(
    monkeypatch: pytest.MonkeyPatch, change: Any, told: str
) -> None:
    for name, value in change(StandInEngine).items():
        wrong = staticmethod(value) if callable(value) else value
        monkeypatch.setattr(StandInEngine, name, wrong)
    driver = StandInDriver()
    opened = StandInTensorRt(trt, bundle(), driver, ml_dtypes.bfloat16)
    with pytest.raises(BundleError, match=told):
        open_gpu_session(bundle(), stand_ins={"driver": driver, "trt": opened, "cards": [CARD]})
    assert not driver.memory


def test_after_a_failure_on_the_card_the_first_message_is_the_one_told(machine: Machine) -> None:
    """Every later call fails too, closing included, which must neither raise nor keep host memory registered."""
    machine.session.step([rows(tokens(0, 20), 20)])
    machine.driver.broken = True
    with pytest.raises(CloverError, match="CUDA_ERROR_ILLEGAL_ADDRESS to cuGraphLaunch"):
        machine.session.step([rows(tokens(0, 20), 20)])
    machine.session.close()
    machine.driver.broken = False
    machine.driver.memory.clear()
    Machine(bundle()).session.close()  # the plugins are free to be registered again


def test_a_plugin_that_fails_in_a_step_fails_the_step(machine: Machine) -> None:
    """Even where TensorRT reports success."""
    machine.session._engine._host.error = CloverError("tensor a lies at an address that is not a multiple of 16")
    with pytest.raises(CloverError, match="failed to start a step: tensor a lies"):
        machine.session.step([rows(tokens(0, 20), 20)])


def test_host_memory_that_can_not_be_page_locked_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandInDriver, "cuMemHostAlloc", lambda self, nbytes, flags: (OUT_OF_MEMORY, 0))
    device = Device(driver=StandInDriver())
    with pytest.raises(CloverError, match=r"no 3\.0 GB of page-locked host memory"):
        device.pin(3 * 10**9)


def test_experts_leave_room_for_what_tentative_commits_keep_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clover.engines.tensorrt.open.RESERVE", 2**20)
    float_caches(monkeypatch)
    roomy = Machine(bundle(), sequences=SEQUENCES)
    state = sum(s.buffer.nbytes for s in roomy.session._state.values())
    needed = state + roomy.trt.engine.get_device_memory_size_for_profile_v2(1)
    size = roomy.session._experts._weights.layout.nbytes
    roomy.session.close()
    small = Machine(bundle(), sequences=SEQUENCES, card_bytes=needed + 2**20 + 20 * size)
    assert small.session._experts.policy.capacity < 20
    small.session.step([SequenceRows(s, tokens(8, 4), 4, np.arange(4), tentative=True) for s in range(SEQUENCES)])
    small.session.close()


@pytest.mark.gpu
def test_a_real_card_equals_the_cpu_session() -> None:
    """On a card: the bundle built for it, against ONNX Runtime on the CPU."""
    from clover.engines.gpu_driver import detected_gpu

    try:
        card = detected_gpu()
    except CloverError as error:
        pytest.skip(f"no card here: {error}")
    built = gpu_bundle(card.name, "bf16", sequences=SEQUENCES, with_logits=True)
    gpu = open_session(built, sequences=SEQUENCES)
    host = open_session(built, provider="cpu", sequences=SEQUENCES, cache=False)
    for plan in (rows(tokens(0, 45), 45), rows(np.full(32, 3), 0), rows(np.full(32, 3), 0)):
        got, want = gpu.step([plan])[0], host.step([plan])[0]
        assert got.logits is not None and want.logits is not None
        assert relative_error(got.logits, want.logits) <= 0.05, "bfloat16 against float32"
    gpu.close()
