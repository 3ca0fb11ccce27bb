"""Class statistics as sums: built in parts, in any order, merged, forgotten, stored and refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from vsm import FewShotClassifier
from vsm.encoders import EncoderIdentity
from vsm.errors import MemoryFileError, VsmError
from vsm.memory import GaussianMemory, Observations, ReadSettings, SlotMemory, SupportSet
from vsm.memory.gaussian import GaussianConsolidation
from vsm.memory.named import NamedMemory, decode_memory
from vsm.runs.loading import read_memory, update_memory
from vsm.settings import Normalization
from vsm.system.tensor_files import load_tensors, save_tensors

WIDTH = 5
SIZES = (4, 1, 9, 2, 12)  # more rows than features in some, one row in one
HOW = ReadSettings("un", 0.7, 0.5, 0.5, 6.0, 1.3)
ENCODER = EncoderIdentity("encoder", "0123456789abcdef")


def values(*shape: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def rows_of(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes 0 … 4 whose sizes differ, one after the other."""
    class_ids = torch.arange(len(SIZES)).repeat_interleave(torch.tensor(SIZES))
    noise = values(len(class_ids), WIDTH, seed=seed) @ values(WIDTH, WIDTH, seed=seed + 1)
    return 2 * values(len(SIZES), WIDTH, seed=seed + 2)[class_ids] + noise + 3, class_ids


CENTER = values(WIDTH, seed=99)


def begin(how: ReadSettings = HOW) -> GaussianMemory:
    return GaussianMemory.empty(CENTER, how)


def at_once(
    chosen: Tensor | None = None, how: ReadSettings = HOW, keep_factors: bool = True
) -> GaussianMemory:
    """Return the memory of all rows, or of ``chosen`` ones."""
    rows, class_ids = rows_of()
    if chosen is not None:
        rows, class_ids = rows[chosen], class_ids[chosen]
    return GaussianMemory.fit(rows, class_ids, CENTER, how, keep_factors)


def assert_same(one: GaussianMemory, other: GaussianMemory) -> None:
    """Compare by class id: counts, means, pooled covariance, and what a reader makes of them."""
    first, second = one.class_ids.argsort(), other.class_ids.argsort()
    assert torch.equal(one.class_ids[first], other.class_ids[second])
    assert torch.equal(one.counts[first], other.counts[second])
    for ours, theirs in (
        (one.content[first], other.content[second]),
        (one.within, other.within),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    support = one.normalize(values(1, 3, 2, WIDTH, seed=7).float())
    queries = one.normalize(values(1, 6, WIDTH, seed=8).float())
    found = [
        memory.reader.infer(SupportSet.of(memory.reader.project(support))).scores(
            memory.reader.project(queries)
        )
        for memory in (one, other)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep_factors", [True, False])
@pytest.mark.parametrize("normalization", ["un", "l2n", "cl2n"])
def test_counts_means_and_scatter_are_those_of_plain_loops(
    normalization: Normalization, keep_factors: bool
) -> None:
    rows, class_ids = rows_of()
    memory = at_once(how=ReadSettings(normalization), keep_factors=keep_factors)
    assert memory.slot_classes == [0, 1, 2, 3, 4]
    assert memory.counts.tolist() == list(SIZES)
    scatter = np.zeros((WIDTH, WIDTH))
    for one in range(len(SIZES)):
        members = []
        for row in rows[class_ids == one].numpy():
            made = row
            if normalization != "un":
                made = made / np.linalg.norm(made)
            if normalization == "cl2n":
                made = made - CENTER.numpy()
                made = made / np.linalg.norm(made)
            members.append(made)
        mean = np.mean(members, 0)
        np.testing.assert_allclose(memory.content[one], mean, atol=1e-12)
        for member in members:
            scatter += np.outer(member - mean, member - mean)
    np.testing.assert_allclose(memory.within, scatter / (sum(SIZES) - len(SIZES)), atol=1e-12)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("parts", [2, 5, 28])
def test_building_in_parts_and_in_any_order_is_building_at_once(order: int, parts: int) -> None:
    rows, class_ids = rows_of()
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order))
    memory = begin()
    for step, part in enumerate(shuffled.tensor_split(parts)):
        memory = memory.add(rows[part], class_ids[part], step)
    assert_same(memory, at_once())
    assert memory.can_be_forgotten.all()
    assert torch.equal(memory.freedom[memory.class_ids.argsort()], torch.tensor(SIZES) - 1)


@pytest.mark.parametrize("keep_factors", [True, False])
def test_adding_a_class_and_adding_images_to_one_is_learning_all_of_them(
    keep_factors: bool,
) -> None:
    rows, class_ids = rows_of()
    later = (class_ids == 3) | (torch.arange(len(rows)) % 4 == 0)
    memory = at_once(~later, keep_factors=keep_factors)
    assert 3 not in memory.slot_classes
    memory = memory.add(rows[later], class_ids[later], 1)
    assert_same(memory, at_once())


@pytest.mark.parametrize("gone", [[0], [1], [2, 4], [0, 1, 2, 3]])
def test_a_class_that_is_forgotten_leaves_nothing_where_its_scatter_was_kept_apart(
    gone: list[int],
) -> None:
    _, class_ids = rows_of()
    kept = [slot for slot in range(len(SIZES)) if slot not in gone]
    memory = at_once().keep(torch.tensor(kept))
    assert_same(memory, at_once(torch.isin(class_ids, torch.tensor(kept))))


def test_a_class_of_the_shared_scatter_leaves_that_and_nothing_else() -> None:
    memory = at_once(keep_factors=False)
    # A class of one image has no scatter, so nothing of it can stay.
    assert memory.can_be_forgotten.tolist() == [False, True, False, False, False]
    kept = memory.keep(torch.tensor([0, 1, 3, 4]))
    assert torch.equal(kept.content, memory.content[[0, 1, 3, 4]])
    assert kept.counts.tolist() == [4, 1, 2, 12]
    assert torch.equal(kept.within, memory.within)


def test_images_added_to_a_class_of_the_shared_scatter_can_be_forgotten_with_it() -> None:
    rows, class_ids = rows_of()
    before = at_once(keep_factors=False)
    more = values(3, WIDTH, seed=20)
    grown = before.add(more, torch.tensor([2, 2, 2]), 1)
    assert not grown.can_be_forgotten[2]
    together = torch.cat([rows, more]), torch.cat([class_ids, torch.tensor([2, 2, 2])])
    assert_same(grown, GaussianMemory.fit(*together, CENTER, HOW))
    kept = torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(grown.keep(kept).within, before.within)


def test_an_added_class_can_be_forgotten_again() -> None:
    before = at_once(keep_factors=False)
    grown = before.add(values(20, WIDTH, seed=21), torch.full((20,), 7), 1)
    assert grown.can_be_forgotten[-1]
    assert not torch.allclose(grown.within, before.within)
    assert_same(grown.keep(torch.arange(len(SIZES))), before)


def test_factors_are_compressed_to_the_number_of_features() -> None:
    memory = begin()
    rows, class_ids = values(60, WIDTH, seed=22), torch.arange(60) % 2
    for step, part in enumerate(torch.arange(60).tensor_split(6)):
        memory = memory.add(rows[part], class_ids[part], step)
        assert memory.factor_rows.max() <= WIDTH
        assert len(memory.factors) == memory.factor_rows.sum()
    for slot, part in enumerate(memory.factors.split(memory.factor_rows.tolist())):
        own = rows[class_ids == slot]
        centered = own - own.mean(0)
        torch.testing.assert_close(part.mT @ part, centered.mT @ centered)


@pytest.mark.parametrize(
    "keep_factors", [(True, True), (True, False), (False, True), (False, False)]
)
def test_merging_is_learning_the_images_of_both(keep_factors: tuple[bool, bool]) -> None:
    """Both know classes 0, 2 and 4, by different images; each knows one that the other does not."""
    _, class_ids = rows_of()
    first = (torch.arange(len(class_ids)) % 2 == 0) & (class_ids != 3)
    second = ~first
    ours, theirs = (
        at_once(part, keep_factors=kept)
        for part, kept in zip((first, second), keep_factors, strict=True)
    )
    assert set(ours.slot_classes) != set(theirs.slot_classes)
    assert_same(ours.merge(theirs, theirs.class_ids), at_once())
    assert_same(theirs.merge(ours, ours.class_ids), at_once())


def test_the_classes_of_a_merged_memory_may_have_other_numbers() -> None:
    rows, class_ids = rows_of()
    ours, theirs = at_once(class_ids < 3), at_once(class_ids >= 3)
    merged = ours.merge(theirs, torch.tensor([11, 10]))
    assert merged.slot_classes[:3] == [0, 1, 2]
    renamed = class_ids.clone()
    renamed[class_ids == 3], renamed[class_ids == 4] = 11, 10
    assert_same(merged, GaussianMemory.fit(rows, renamed, CENTER, HOW))


@pytest.mark.parametrize("keep_factors", [True, False])
def test_an_empty_memory_merges_with_any(keep_factors: bool) -> None:
    full = at_once(keep_factors=keep_factors)
    assert_same(full.merge(begin(), torch.zeros(0, dtype=torch.int64)), full)
    assert_same(begin().merge(full, full.class_ids), full)


def test_the_same_evidence_counts_once() -> None:
    _, class_ids = rows_of()
    for kept in (True, False):
        memory = at_once(keep_factors=kept)
        assert_same(memory.merge(memory, memory.class_ids), memory)
        # One went on with another class, the other with a class of its own.
        ours = memory.add(values(4, WIDTH, seed=30), torch.full((4,), 8), 1)
        theirs = memory.add(values(6, WIDTH, seed=31), torch.full((6,), 9), 1)
        merged = ours.merge(theirs, theirs.class_ids)
        in_turn = ours.add(values(6, WIDTH, seed=31), torch.full((6,), 9), 1)
        assert_same(merged, in_turn)
    # A twin whose scatter is apart in the other memory is left out with it.
    shared, apart = at_once(keep_factors=False), at_once(class_ids != 0)
    assert_same(shared.merge(apart, apart.class_ids), shared)


def test_equal_counts_alone_make_no_twins() -> None:
    rows, class_ids = rows_of()
    moved = GaussianMemory.fit(rows + 0.1, class_ids, CENTER, HOW)
    merged = at_once(keep_factors=False).merge(moved, moved.class_ids)
    both = torch.cat([rows, rows + 0.1]), torch.cat([class_ids, class_ids])
    assert_same(merged, GaussianMemory.fit(*both, CENTER, HOW))


def test_twins_whose_scatter_cannot_be_told_apart_are_refused() -> None:
    _, class_ids = rows_of()
    ours = at_once(class_ids < 3, keep_factors=False)
    theirs = at_once(class_ids > 1, keep_factors=False)
    with pytest.raises(MemoryFileError, match="merge: both hold classes that were learned from"):
        ours.merge(theirs, theirs.class_ids)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, center=m.center + 0.1),
        lambda m: replace(m, reading=ReadSettings("l2n", 0.7, 0.5).tensor()),
    ],
)
def test_memories_of_other_centers_or_normalizations_are_not_merged(
    change: Callable[[GaussianMemory], GaussianMemory],
) -> None:
    memory = at_once()
    with pytest.raises(MemoryFileError, match="merge: the memories normalize features differently"):
        memory.merge(change(memory), memory.class_ids)


def test_the_first_classes_alone_are_what_learning_them_gives() -> None:
    _, class_ids = rows_of()
    assert_same(at_once().first(2), at_once(class_ids < 2))
    full = at_once(keep_factors=False)
    assert full.first(99) is full
    empty = full.first(0)
    assert len(empty) == 0
    assert not empty.within.any()
    assert empty.read_settings.normalization == HOW.normalization
    with pytest.raises(
        MemoryFileError, match="memory: the scatter of its 5 classes is kept as one"
    ):
        full.first(2)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("normalization", ["un", "l2n", "cl2n"])
def test_features_that_are_no_numbers_are_refused_in_one_line_and_change_nothing(
    normalization: Normalization, wrong: float
) -> None:
    memory = at_once(how=ReadSettings(normalization))
    before = {name: value.clone() for name, value in memory.tensors().items()}
    rows, class_ids = rows_of()
    rows[3, 1] = wrong
    attempts: list[Callable[[], GaussianMemory]] = [
        lambda: GaussianMemory.fit(rows, class_ids, CENTER, ReadSettings(normalization)),
        lambda: memory.add(memory.normalize(rows), class_ids, 1),
        lambda: GaussianConsolidation(WIDTH)(memory, Observations(rows, class_ids), 1),
    ]
    for attempt in attempts:
        with pytest.raises(MemoryFileError, match="features: some are infinite or not a") as error:
            attempt()
        assert "\n" not in str(error.value)
    for name, value in memory.tensors().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_classifier_refuses_features_that_are_no_numbers_and_keeps_its_memory(
    wrong: float,
) -> None:
    rows, class_ids = rows_of()
    classifier = FewShotClassifier().learn_memory(rows, class_ids.tolist())
    memory = classifier.memory
    rows[2, 0] = wrong
    with pytest.raises(VsmError, match="features: row 2 holds NaN, infinity") as error:
        classifier.learn_memory(rows, class_ids.tolist())
    assert "\n" not in str(error.value)
    assert classifier.memory is memory


@pytest.mark.parametrize("sizes", [[1], [3], [1, 1], [1, 5], [2, 2, 2]])
def test_any_number_of_classes_and_images_makes_a_memory_that_answers(sizes: list[int]) -> None:
    class_ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    rows = values(len(class_ids), WIDTH, seed=40)
    classifier = FewShotClassifier().learn_memory(rows, class_ids.tolist())
    new = values(2, WIDTH, seed=41)
    probabilities = classifier.fit(new, ["a", "b"]).predict_proba(new)
    assert np.isfinite(probabilities).all()
    assert classifier.predict(new).tolist() == ["a", "b"]


def named(memory: GaussianMemory, names: str = "abcde") -> NamedMemory:
    return NamedMemory(memory, tuple(names), ENCODER, ({"action": "learned"},), "vsm")


def statistics(memory: NamedMemory) -> GaussianMemory:
    assert isinstance(memory.memory, GaussianMemory)
    return memory.memory


def by_name(memory: NamedMemory) -> GaussianMemory:
    """Number classes by the alphabet, so that memories can be compared by their names."""
    return replace(
        statistics(memory), class_ids=torch.tensor([ord(name) - ord("a") for name in memory.names])
    )


CONSOLIDATION = GaussianConsolidation(WIDTH)


def test_names_stay_with_their_statistics_when_classes_are_added_and_forgotten() -> None:
    rows, class_ids = rows_of()
    labels = ["abcde"[c] for c in class_ids]
    early = (torch.arange(len(rows)) % 3 == 0) & (class_ids != 1)
    memory = named(at_once(early), "acde")
    later = (~early).nonzero().flatten().flip(0)  # the last class comes first
    memory, changes = memory.add(
        CONSOLIDATION, rows[later], [labels[row] for row in later], {"from": "test"}
    )
    assert changes.added == ("b",)
    assert set(changes.updated) == set("acde")
    assert_same(by_name(memory), at_once())
    memory = memory.forget(["c", "a"])
    assert memory.provenance[-1]["scatter_stays"] == []
    assert set(memory.names) == set("bde")
    left = torch.isin(class_ids, torch.tensor([1, 3, 4]))
    assert_same(by_name(memory), at_once(left))
    memory, changes = memory.add(
        CONSOLIDATION, rows[~left], [labels[row] for row in (~left).nonzero().flatten()], {}
    )
    assert changes.added == ("a", "c")
    assert_same(by_name(memory), at_once())


def test_forgetting_names_the_classes_whose_scatter_stays() -> None:
    memory = named(at_once(keep_factors=False))
    memory, _ = memory.add(CONSOLIDATION, values(4, WIDTH, seed=50), ["new"] * 4, {})
    memory = memory.forget(["new", "b", "c"])
    assert memory.provenance[-1]["scatter_stays"] == ["c"]
    torch.testing.assert_close(statistics(memory).within, at_once(keep_factors=False).within)


def test_named_memories_of_one_encoder_merge_by_name() -> None:
    rows, class_ids = rows_of()
    ours, theirs = class_ids <= 2, class_ids >= 2
    theirs = theirs & ~((class_ids == 2) & (torch.arange(len(rows)) % 2 == 0))
    ours = ~theirs
    first = named(at_once(ours), "abc")
    numbered_anew = replace(at_once(theirs), class_ids=torch.arange(3))  # 0 is not a, but c
    second = named(numbered_anew, "cde")
    for one, other in ((first, second), (second, first)):
        merged = one.merge(other)
        assert set(merged.names) == set("abcde")
        assert_same(by_name(merged), at_once())
    empty = named(begin(), "")
    for one, other in ((empty, first), (first, empty)):
        assert_same(by_name(one.merge(other)), by_name(first))


def test_named_memories_of_another_encoder_or_kind_are_refused() -> None:
    memory = named(at_once())
    other = replace(memory, encoder=EncoderIdentity("other", "fedcba"))
    with pytest.raises(MemoryFileError, match="merge: holds features of the encoder other"):
        memory.merge(other)
    slots = replace(memory, memory=SlotMemory.empty(WIDTH), names=())
    for one, two in ((memory, slots), (slots, memory)):
        with pytest.raises(MemoryFileError, match="merge: one holds class statistics and the"):
            one.merge(two)


@pytest.mark.parametrize("keep_factors", [True, False])
def test_a_file_gives_back_the_same_memory(keep_factors: bool, tmp_path: Path) -> None:
    memory, path = named(at_once(keep_factors=keep_factors)), tmp_path / "memory.safetensors"
    memory, _ = memory.add(CONSOLIDATION, values(7, WIDTH, seed=60), ["new"] * 7, {})
    memory.write(path)
    again = read_memory(path)
    assert again.names == memory.names
    assert again.provenance == memory.provenance
    for name, value in memory.memory.tensors().items():
        assert torch.equal(again.memory.tensors()[name], value)
        assert again.memory.tensors()[name].dtype == value.dtype
    assert statistics(again).read_settings == HOW
    update_memory(path, lambda found: found.forget(["new"]))
    torch.testing.assert_close(
        statistics(read_memory(path)).within, at_once().within, rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize(("precision", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-2)])
def test_a_file_of_less_precision_is_read_in_double_precision(
    precision: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    memory, path = named(at_once(how=HOW._replace(epsilon=torch.inf))), tmp_path / "memory"
    stored = {
        name: value.to(precision) if value.is_floating_point() else value
        for name, value in memory.memory.tensors().items()
    }
    save_tensors(path, stored, memory.metadata())
    again = statistics(decode_memory(*load_tensors(path), path))
    for name, value in again.tensors().items():
        assert value.dtype == memory.memory.tensors()[name].dtype
        torch.testing.assert_close(
            value, memory.memory.tensors()[name], rtol=tolerance, atol=tolerance
        )
    assert again.read_settings.epsilon == torch.inf
    assert again.read_settings.normalization == "un"
    assert again.reader.rotation.isfinite().all()


def test_reading_never_writes() -> None:
    memory = at_once()
    before = {name: value.clone() for name, value in memory.tensors().items()}
    memory.add(values(3, WIDTH, seed=1), torch.tensor([0, 0, 9]), 4)
    memory.merge(memory.add(values(2, WIDTH, seed=2), torch.tensor([1, 9]), 5), torch.arange(6))
    memory.keep(torch.tensor([0, 2]))
    _ = memory.reader
    for name, value in memory.tensors().items():
        assert torch.equal(value, before[name])


def test_the_last_update_of_a_class_is_its_latest() -> None:
    memory = begin().add(values(2, WIDTH, seed=1), torch.tensor([4, 2]), 3)
    memory = memory.add(values(2, WIDTH, seed=2), torch.tensor([9, 4]), 8)
    assert memory.slot_classes == [2, 4, 9]
    assert memory.last_update.tolist() == [3, 8, 8]
    older = begin().add(values(2, WIDTH, seed=3), torch.tensor([2, 4]), 5)
    assert memory.merge(older, older.class_ids).last_update.tolist() == [5, 8, 8]
