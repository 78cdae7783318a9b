"""Sequences by their global numbers."""

from __future__ import annotations

import itertools
import os

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.indexed import ShardWriter
from ultrascale.data.loader import IGNORED, Loader
from ultrascale.data.manifest import CorpusManifest, ShardRecord, TokenizerFacts, save_manifest
from ultrascale.demo.story import unigram_entropy
from ultrascale.description.run import Source

GOLDEN_ORDER = [58, 42, 53, 93, 61, 22, 5, 100]
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_folder(folder, shards, *, vocab_size=1000, fingerprint="tokenizer"):
    """A prepared folder of these documents, without a tokenizer file."""
    folder.mkdir(parents=True, exist_ok=True)
    records = []
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder / f"s{number}", "uint16")
        for document in documents:
            writer.append(document)
            writer.end_document()
        written = writer.finish()
        records.append(ShardRecord(f"s{number}", written.documents, written.tokens, written.bin_sha256, written.idx_sha256))
    facts = TokenizerFacts(fingerprint, vocab_size, "<|endoftext|>", 0)
    save_manifest(CorpusManifest("uint16", facts, tuple(records), {}), folder)
    return folder


def random_shards(seed, num_shards=3, longest=30):
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(1, 1000, rng.integers(1, longest)).tolist() for _ in range(rng.integers(0, 12))]
        for _ in range(num_shards)
    ]


def loader(*folders, weights=None, length=8, seed=0, **options):
    weights = weights or [1.0] * len(folders)
    sources = tuple(Source(str(folder), weight) for folder, weight in zip(folders, weights, strict=True))
    return Loader(sources, sequence_length=length, vocab_size=1000, seed=seed, **options)


def oracle(shards, sequence, length, document_mask):
    """One sequence the slow way: walk the stream token by token."""
    stream = [(token, place == 0) for shard in shards for document in shard for place, token in enumerate(document)]
    part = stream[sequence * length : sequence * length + length + 1]
    tokens, targets, positions, ids = [], [], [], []
    position, document = -1, 0
    for place in range(length):
        token, begins = part[place]
        if place and begins and document_mask:
            position, document = -1, document + 1
        position += 1
        following, ends = part[place + 1]
        tokens.append(token)
        targets.append(IGNORED if ends and document_mask else following)
        positions.append(position)
        ids.append(document)
    return tokens, targets, positions, ids


@given(seed=st.integers(0, 10**6), length=st.integers(1, 40), document_mask=st.booleans())
@FEW
def test_sequences_equal_a_slow_walk_over_the_documents(tmp_path_factory, seed, length, document_mask):
    shards = [*random_shards(seed), [list(range(1, 60))]]
    folder = write_folder(tmp_path_factory.mktemp("data"), shards)
    it = loader(folder, length=length, document_mask=document_mask)
    numbers = range(it.sequences_per_epoch[0])
    read = it.read(numbers)
    _, inside = it.locate(numbers)
    for row, sequence in enumerate(inside):
        expected = oracle(shards, int(sequence), length, document_mask)
        found = (read.tokens[row], read.targets[row], read.positions[row], read.document_ids[row])
        assert tuple(part.tolist() for part in found) == expected


@pytest.mark.catalogue(45)
def test_an_epoch_predicts_every_token_once(tmp_path):
    tokens = list(range(1, 962))
    it = loader(write_folder(tmp_path, [[tokens[:500]], [tokens[500:]]]), document_mask=False)
    for epoch in range(3):
        read = it.read(range(epoch * 120, (epoch + 1) * 120))
        assert sorted(read.targets.ravel().tolist()) == tokens[1:]


@pytest.mark.catalogue(42, 45)
@given(dp=st.sampled_from([1, 2, 4, 8]), micro=st.sampled_from([1, 2]), step=st.integers(0, 50))
@FEW
def test_any_split_of_a_step_over_ranks_and_micro_batches_reads_the_same_batch(tmp_path_factory, dp, micro, step):
    folder = write_folder(tmp_path_factory.mktemp("data"), [[list(range(1, 999))]])
    numbers = list(range(step * 16, step * 16 + 16))
    whole = loader(folder).read(numbers).tokens
    share = 16 // dp
    ranks = [numbers[rank * share : (rank + 1) * share] for rank in range(dp)]
    parts = [loader(folder).read(rank[at : at + micro]).tokens for rank in ranks for at in range(0, share, micro)]
    assert np.array_equal(np.concatenate(parts), whole)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=12))
@FEW
def test_a_sequence_does_not_depend_on_what_was_read_before(tmp_path_factory, numbers):
    folder = write_folder(tmp_path_factory.mktemp("data"), [*random_shards(5, longest=50), [list(range(1, 50))]])
    used = loader(folder)
    one_by_one = [used.read([number]).tokens[0] for number in reversed(numbers)][::-1]
    assert np.array_equal(loader(folder).read(numbers).tokens, np.array(one_by_one))


def test_the_seed_decides_the_order(tmp_path):
    folder = write_folder(tmp_path, [[list(range(1, 999))]])
    first, second = (loader(folder, seed=seed).read(range(50)).tokens for seed in (1, 2))
    assert not np.array_equal(first, second)


def test_the_order_of_a_seed_never_changes(tmp_path):
    """A run begun with one release resumes with another: these numbers are a promise."""
    it = loader(write_folder(tmp_path, [[list(range(1, 999))]]), seed=7)
    assert it.locate([0, 1, 2, 3, 123, 124, 125, 10**12])[1].tolist() == GOLDEN_ORDER


def test_blended_sources_are_read_in_their_shares(tmp_path):
    few = write_folder(tmp_path / "a", [[[1] * 100]])
    many = write_folder(tmp_path / "b", [[[2] * 900]])
    read = loader(few, many, weights=[3, 1], document_mask=False).read(range(1000))
    assert [int((read.tokens[:, 0] == token).sum()) for token in (1, 2)] == [750, 250]


def test_a_step_of_eight_by_256_takes_well_under_a_millisecond_of_python(tmp_path):
    """Counted in calls, which do not depend on what else the machine does: 0.17 ms when measured alone."""
    import cProfile
    import pstats

    rng = np.random.default_rng(0)
    shards = [[rng.integers(1, 1000, 200).tolist() for _ in range(500)] for _ in range(2)]
    it = loader(write_folder(tmp_path, shards), length=256)
    it.read(range(8))
    profile = cProfile.Profile()
    profile.enable()
    it.read(range(8, 16))
    profile.disable()
    assert pstats.Stats(profile).total_calls < 500  # type: ignore[attr-defined]


def test_more_shards_than_file_descriptors_can_be_read(tmp_path):
    import resource

    folder = write_folder(tmp_path, [[[shard + 1] * 8] for shard in range(300)])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    already = psutil.Process().num_fds()  # other tests of this process leave some
    resource.setrlimit(resource.RLIMIT_NOFILE, (already + 300, limits[1]))
    try:
        it = loader(folder)
        read = it.read(range(it.sequences_per_epoch[0]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert sorted(set(read.tokens.ravel().tolist())) == list(range(1, 300))


@pytest.mark.catalogue(57)
def test_an_id_past_the_models_vocabulary_names_shard_and_token(tmp_path):
    folder = write_folder(tmp_path, [[list(range(1, 20))], [[5] * 10 + [1500] + [5] * 10]])
    with pytest.raises(DataError, match=r"s1\.bin, token 10 \(byte 20\): id 1500 is not in 0 to 999"):
        loader(folder).read(range(4))


@pytest.mark.catalogue(59)
def test_a_tokenizer_larger_than_the_model_is_refused_at_once(tmp_path):
    with pytest.raises(DataError, match=r"ids up to 4999, the model 1000"):
        loader(write_folder(tmp_path, [[[1] * 20]], vocab_size=5000))


@pytest.mark.catalogue(59)
def test_sources_of_different_tokenizers_are_refused(tmp_path):
    folders = [write_folder(tmp_path / name, [[[1] * 20]], fingerprint=name) for name in ("a", "b")]
    with pytest.raises(DataError, match=r"b: was prepared with another tokenizer than .*a"):
        loader(*folders)


@pytest.mark.catalogue(45)
def test_a_source_shorter_than_one_sequence_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds 8 tokens, a sequence needs 9.*evaluation.every_steps = .none"):
        loader(write_folder(tmp_path, [[[1] * 8]]))


def test_no_source_is_refused():
    with pytest.raises(DataError, match="names no source"):
        loader()


def test_an_invisible_weight_is_refused(tmp_path):
    folder = write_folder(tmp_path, [[[1] * 20]])
    with pytest.raises(DataError, match="weight 1e-09 of source 1"):
        loader(folder, folder, weights=[1, 1e-9])


def test_a_negative_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="numbered from 0, got -1"):
        loader(write_folder(tmp_path, [[[1] * 20]])).read([-1])


def test_no_numbers_give_no_sequences(tmp_path):
    assert loader(write_folder(tmp_path, [[[1] * 20]])).read([]).tokens.shape == (0, 8)


@pytest.mark.catalogue(58)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda folder: (folder / "s1.bin").unlink(), r"s1\.bin: is missing"),
        (lambda folder: (folder / "s1.idx").unlink(), r"s1\.idx: is missing"),
        (lambda folder: (folder / "s1.bin").write_bytes(b"\1\0"), r"s1\.bin: is 2 bytes, the manifest promises 40"),
        (lambda folder: (folder / "manifest.json").unlink(), r"holds no manifest\.json, so it was not prepared to the end"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json: cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text('{"format": "x"}'), r"has format 'x'"),
    ],
)
def test_a_damaged_folder_is_refused_at_the_start(tmp_path, damage, expected):
    folder = write_folder(tmp_path, [[[1] * 20], [[2] * 20]])
    damage(folder)
    with pytest.raises(DataError, match=expected):
        loader(folder)


@pytest.mark.catalogue(58)
@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_cut_short_while_it_is_read_is_named_with_both_sizes(tmp_path, suffix):
    folder = write_folder(tmp_path / "data", [[list(range(1, 100))]])
    reader, file = loader(folder), folder / f"s0{suffix}"
    reader.read([0])
    size = file.stat().st_size
    os.truncate(file, size - 2)
    with pytest.raises(DataError, match=rf"s0\{suffix}: is {size - 2} bytes, and was {size} when this run opened it"):
        reader.read([0])


@pytest.mark.catalogue(58)
def test_a_path_that_is_nothing_says_how_to_make_one(tmp_path):
    with pytest.raises(DataError, match="data prepare"):
        loader(tmp_path / "nothing")


def test_a_foreign_prefix_is_read_without_a_manifest(tmp_path):
    writer = ShardWriter(tmp_path / "theirs", "int32")
    writer.add_documents(range(20), [5, 15])
    writer.finish()
    for path in ("theirs", "theirs.bin", "theirs.idx"):
        read = loader(tmp_path / path, length=19).read([0])
        assert read.document_ids[0].tolist() == [0] * 5 + [1] * 14


@pytest.mark.catalogue(44)
def test_the_fingerprint_follows_content_and_weight_but_not_the_path(tmp_path):
    same = [loader(write_folder(tmp_path / name, [[[1] * 20]])).fingerprint() for name in ("a", "b")]
    other = loader(write_folder(tmp_path / "c", [[[1] * 19 + [2]]])).fingerprint()
    weighted = loader(tmp_path / "a", weights=[2]).fingerprint()
    assert same[0] == same[1]
    assert len({same[0], other, weighted}) == 3


def test_the_fingerprint_of_a_foreign_prefix_follows_its_content(tmp_path):
    prints = []
    for name, last in itertools.product("ab", (7, 8)):
        writer = ShardWriter(tmp_path / f"{name}{last}", "int32")
        writer.add_documents([*range(30), last], [31])
        writer.finish()
        prints.append(Corpus(tmp_path / f"{name}{last}").fingerprint())
    assert prints[:2] == prints[2:]
    assert prints[0] != prints[1]


def test_documents_of_one_token_are_refused_where_none_is_ever_predicted_and_only_there(tmp_path):
    for name, lengths in (("none", [1] * 20), ("one", [0, *[1] * 18, 2])):
        writer = ShardWriter(tmp_path / name, "int32")
        writer.add_documents(range(20), lengths)
        writer.finish()
    with pytest.raises(DataError, match=r"none: has only documents of one token.*data\.document_mask"):
        loader(tmp_path / "none")
    assert (loader(tmp_path / "none", document_mask=False).read([0]).targets != IGNORED).all()
    assert (loader(tmp_path / "one", length=19).read([0]).targets != IGNORED).sum() == 1


def test_unigram_entropy_is_that_of_the_counts(tmp_path):
    folder = write_folder(tmp_path, [[[1, 1, 2]], [[3]]])
    assert unigram_entropy(folder) == pytest.approx(1.5 * np.log(2), abs=1e-12)
