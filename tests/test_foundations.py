"""Seeding, atomic files, statistics, run-time set-up."""

import math
import subprocess
import sys
from itertools import product
from pathlib import Path
from statistics import correlation, mean, stdev

import pytest
import torch

from vsm.evaluation.intervals import (
    auroc,
    class_bootstrap,
    estimate,
    reliability,
    spearman,
    student_quantile,
)
from vsm.seeding import (
    bernoulli,
    categorical,
    default_generator,
    derive_seed,
    generator,
    integers,
    normal,
    task_generators,
    uniform,
)
from vsm.system.allocator import keep_allocations
from vsm.system.files import atomic_directory, atomic_path, write_text


def test_seeds_depend_on_every_part_and_their_order() -> None:
    seeds = [
        derive_seed(0),
        derive_seed(1),
        derive_seed(0, "a"),
        derive_seed(0, "b"),
        derive_seed(0, "a", "b"),
        derive_seed(0, "b", "a"),
        derive_seed(0, "a", 1),
        derive_seed(0, "a1"),
    ]
    assert len(set(seeds)) == len(seeds)
    assert derive_seed(0, "noise", 3) == derive_seed(0, "noise", 3)


def test_generators_of_one_name_draw_the_same() -> None:
    one, two = (torch.rand(4, generator=generator(0, "x")) for _ in range(2))
    assert torch.equal(one, two)


def test_the_default_generator_is_restored() -> None:
    torch.manual_seed(0)
    with default_generator(5, "weights"):
        inside = torch.rand(2)
    after = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(2))
    with default_generator(5, "weights"):
        assert torch.equal(inside, torch.rand(2))


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    write_text(target, "old")

    def fail() -> None:
        with atomic_path(target) as temporary:
            temporary.write_text("half")
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        fail()
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file.txt"]


def test_a_folder_that_another_process_made_first_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with atomic_directory(target) as ours:
        (ours / "who").write_text("ours")
        target.mkdir()
        (target / "who").write_text("theirs")
    assert (target / "who").read_text() == "theirs"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_task_meets_the_same_noise_whichever_tasks_are_drawn_with_it() -> None:
    whole, share = (task_generators(0, "noise", 7, tasks) for tasks in (range(4), range(2, 4)))
    torch.testing.assert_close(normal(whole, 12, 5)[6:], normal(share, 6, 5), rtol=0, atol=0)
    torch.testing.assert_close(uniform(whole, 12, 5)[6:], uniform(share, 6, 5), rtol=0, atol=0)
    assert torch.equal(integers(whole, 1000, 12, 5)[6:], integers(share, 1000, 6, 5))
    for probability in (0.5, 0.9):
        drawn = bernoulli(whole, probability, 12, 5), bernoulli(share, probability, 6, 5)
        assert torch.equal(drawn[0][6:], drawn[1])
    even = torch.ones(12, 1000)
    assert torch.equal(categorical(whole, even, 5)[6:], categorical(share, even[6:], 5))


def test_draws_by_task_follow_their_distributions() -> None:
    random = task_generators(0, "noise", 0, range(2))
    values = normal(random, 2, 50_000)
    assert values.mean(1).abs().max() < 0.02
    torch.testing.assert_close(values.var(1), torch.ones(2), rtol=0.03, atol=0)
    assert torch.corrcoef(values)[0, 1].abs() < 0.02
    assert (uniform(random, 2, 50_000).mean(1) - 0.5).abs().max() < 0.01
    assert integers(random, 5, 2, 1000).unique().tolist() == [0, 1, 2, 3, 4]
    drawn = categorical(random, torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.0, 0.0]]), 20_000)
    frequencies = torch.bincount(drawn[0], minlength=3) / 20_000
    torch.testing.assert_close(frequencies, torch.tensor([0.0, 0.25, 0.75]), atol=0.02, rtol=0)
    assert drawn[1].unique().tolist() == [0]


@pytest.mark.parametrize("probability", [0.5, 0.25, 0.9, 0.99, 0.0, 1.0])
def test_ones_come_with_their_probability_and_independently(probability: float) -> None:
    count = 400_000
    drawn = bernoulli(task_generators(0, "noise", 0, range(2)), probability, 2, count).double()
    assert set(drawn.unique().tolist()) <= {0.0, 1.0}
    deviation = math.sqrt(probability * (1 - probability) / count)
    assert (drawn.mean(1) - probability).abs().max() <= 4 * deviation
    if deviation:  # of neighbors, which share a draw of the generator, and of tasks
        pairs = [(drawn[0, :-step], drawn[0, step:]) for step in (1, 2, 4, 8)]
        for one, other in [*pairs, (drawn[0], drawn[1])]:
            assert torch.corrcoef(torch.stack([one, other]))[0, 1].abs() < 4 / math.sqrt(count)


def test_generators_that_cannot_share_the_rows_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="2 generators cannot share 3 rows"):
        bernoulli(task_generators(0, "noise", 0, range(2)), 0.5, 3)
    with pytest.raises(ValueError, match="2 generators cannot share 3 rows"):
        normal(task_generators(0, "noise", 0, range(2)), 3)


def test_the_interval_covers_the_true_mean_95_times_in_100(random: torch.Generator) -> None:
    hits = 0
    for _ in range(1000):
        one = estimate(torch.randn(200, generator=random) + 3)
        hits += abs(one.mean - 3) <= one.ci95
    assert 930 <= hits <= 970


def test_the_class_bootstrap_equals_a_plain_loop(random: torch.Generator) -> None:
    class_ids = torch.tensor([[7, 2, 9], [2, 9, 4], [9, 7, 2], [2, 4, 9]])
    values = torch.rand(4, 3, 3, generator=random, dtype=torch.float64)
    found = class_bootstrap(values, class_ids, torch.Generator().manual_seed(5), resamples=50)
    classes = [2, 4, 7, 9]
    means = []
    for draw in integers(torch.Generator().manual_seed(5), 4, 50, 4).tolist():
        seen = []
        for first, second in product(draw, draw):  # a class that was drawn twice, twice
            for episode, row in enumerate(class_ids.tolist()):
                if first != second and classes[first] in row and classes[second] in row:
                    i, j = row.index(classes[first]), row.index(classes[second])
                    seen.append(values[episode, i, j].item())
        if seen:
            means.append(2 * sum(seen) / len(seen))
    off = values.sum() - values.diagonal(dim1=1, dim2=2).sum()
    assert found.mean == pytest.approx(off.item() / 12)
    expected = student_quantile(3) * (4 / 3) ** 0.5 * stdev(means)
    assert found.ci95 == pytest.approx(expected)


@pytest.mark.parametrize(
    ("role", "least", "most"), [(1.0, 0.91, 0.98), (0.0, 0.91, 0.98), (-1.0, 0.95, 1.0)]
)
def test_the_class_bootstrap_covers_the_mean_of_the_world_its_classes_come_from(
    role: float, least: float, most: float, random: torch.Generator
) -> None:
    """``role`` is how a class does as a wrong answer, relative to how it does as the right one."""
    covered = {"classes": 0, "episodes": 0}
    for _ in range(200):
        effects = 0.2 * torch.randn(20, generator=random)
        class_ids = torch.rand(200, 20, generator=random).topk(5).indices
        one = effects[class_ids]
        values = 0.3 + one.unsqueeze(2) + role * one.unsqueeze(1)
        values = values + 0.3 * torch.randn(200, 5, 5, generator=random)
        by_class = class_bootstrap(values, class_ids, random, resamples=300)
        totals = values.sum(2) - values.diagonal(dim1=1, dim2=2)  # [E, N]
        by_episode = estimate(totals.mean(1))
        assert by_class.mean == pytest.approx(by_episode.mean, rel=1e-5)
        covered["classes"] += abs(by_class.mean - 4 * 0.3) < by_class.ci95
        covered["episodes"] += abs(by_episode.mean - 4 * 0.3) < by_episode.ci95
    assert least <= covered["classes"] / 200 <= most
    if role >= 0:  # otherwise a class adds up to nothing, and episodes are all there is
        assert covered["episodes"] / 200 < 0.7


def test_rank_correlation_is_that_of_a_plain_loop_and_shares_ranks_among_ties() -> None:
    first, second = [3.0, 1.0, 3.0, 9.0, 2.0], [1.0, 0.0, 5.0, 4.0, 4.0]

    def ranks(values: list[float]) -> list[float]:
        order = sorted(values)
        return [mean(i for i, other in enumerate(order) if other == value) for value in values]

    assert ranks(first) == [2.5, 0, 2.5, 4, 1]
    expected = correlation(ranks(first), ranks(second))
    assert spearman(torch.tensor(first), torch.tensor(second)) == pytest.approx(expected)
    rising = torch.arange(6.0)
    assert spearman(rising, rising.exp()) == pytest.approx(1)
    assert spearman(rising, -(rising**3)) == pytest.approx(-1)
    assert math.isnan(spearman(rising, torch.ones(6)))


def test_the_area_under_a_curve_counts_pairs_and_halves_ties(random: torch.Generator) -> None:
    lower = torch.randint(0, 6, (3, 7), generator=random)
    higher = torch.randint(2, 8, (3, 5), generator=random)
    expected = [
        mean((one < two) + (one == two) / 2 for one in row for two in other)
        for row, other in zip(lower.tolist(), higher.tolist(), strict=True)
    ]
    assert auroc(lower, higher).tolist() == pytest.approx(expected)
    assert auroc(torch.zeros(4), torch.ones(2)).item() == 1


def test_calibration_error_equals_a_plain_loop(random: torch.Generator) -> None:
    confidence = torch.rand(500, generator=random)
    correct = torch.rand(500, generator=random) < 0.6
    expected = 0.0
    for b in range(15):
        inside = [i for i in range(500) if b / 15 < confidence[i].item() <= (b + 1) / 15]
        if inside:
            mean_confidence = sum(confidence[i].item() for i in inside) / len(inside)
            accuracy = sum(correct[i].item() for i in inside) / len(inside)
            expected += len(inside) / 500 * abs(accuracy - mean_confidence)
    measured = reliability(confidence, correct).expected_calibration_error
    assert measured == pytest.approx(expected, abs=1e-6)


def test_confident_and_right_is_calibrated_and_confident_and_wrong_is_not() -> None:
    certain = torch.ones(10)
    assert reliability(certain, torch.ones(10)).expected_calibration_error == 0
    assert reliability(certain, torch.zeros(10)).expected_calibration_error == 1


def test_the_allocator_setting_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VSM_KEEP_ALLOCATIONS", "0")
    assert keep_allocations() is False


FREEING = """
import ctypes, sys, threading
from pathlib import Path
from vsm.system.allocator import keep_allocations

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
kept = keep_allocations(in_threads=sys.argv[1] == "all")

def pages():
    return int(Path("/proc/self/statm").read_text().split()[1])

def use():
    before, size = pages(), 200 * 2**20
    address = libc.malloc(size)
    ctypes.memset(address, 1, size)
    libc.free(address)
    print(kept, (pages() - before) * 4096 > size / 2)

thread = threading.Thread(target=use)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc")
@pytest.mark.parametrize("threads", ["first", "all"])
def test_large_memory_that_a_thread_frees_is_kept_on_request(threads: str) -> None:
    command = [sys.executable, "-c", FREEING, threads]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    if done.stdout.startswith("False"):
        pytest.skip("another C library")
    assert done.stdout.split() == ["True", str(threads == "all")]
