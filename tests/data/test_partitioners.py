import numpy as np
import pytest

from fedfrozen_app.config import ConfigError
from fedfrozen_app.data import partitioners as rules
from fedfrozen_app.seeds import derive_seed, numpy_generator

# Unequal classes in mixed order; class 3 of 0..7 has no example.
SIZES = np.array([101, 53, 211, 0, 7, 149, 83, 397])
LABELS = np.random.default_rng(1).permutation(np.repeat(np.arange(8), SIZES))


def assert_each_exactly_once(clients, num_examples):
    assert sorted(np.concatenate(clients).tolist()) == list(range(num_examples))
    assert all(rows.dtype == np.int64 and np.all(np.diff(rows) > 0) for rows in clients)


def counts(clients, labels=LABELS):
    return np.array([np.bincount(labels[rows], minlength=labels.max() + 1) for rows in clients])


# --- subsets ----------------------------------------------------------------------------
def test_balanced_subset_is_as_equal_as_the_classes_allow():
    chosen = rules.balanced_subset(LABELS, 331, numpy_generator(1, "test"))
    assert len(chosen) == 331 and np.all(np.diff(chosen) > 0)
    taken = np.bincount(LABELS[chosen], minlength=8)
    # 7 and 53 are all there is; the other five share 331 - 60 = 271 as 54, 54, 54, 54, 55.
    assert taken[3] == 0 and taken[4] == 7 and taken[1] == 53
    assert sorted(taken[[0, 2, 5, 6, 7]].tolist()) == [54, 54, 54, 54, 55]


def test_balanced_subset_smaller_than_the_classes_takes_one_of_some():
    chosen = rules.balanced_subset(LABELS, 3, numpy_generator(1, "test"))
    assert sorted(np.bincount(LABELS[chosen], minlength=8).tolist()) == [0, 0, 0, 0, 0, 1, 1, 1]


def test_stratified_subset_takes_the_same_share_of_every_class():
    chosen = rules.stratified_subset(LABELS, 200, numpy_generator(1, "test"))
    assert len(chosen) == 200 and np.all(np.diff(chosen) > 0)
    assert np.abs(np.bincount(LABELS[chosen]) - SIZES * 200 / 1001).max() < 1


def test_subsets_follow_their_generator_and_are_not_the_first_rows():
    draws = [
        rules.balanced_subset(LABELS, 331, numpy_generator(seed, "test")).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]


# --- rules ------------------------------------------------------------------------------
@pytest.mark.parametrize("num_clients", [1, 2, 17, 97])
def test_every_example_goes_to_exactly_one_client(num_clients):
    for clients in (
        rules.divide_iid(len(LABELS), num_clients, 1),
        rules.divide_dirichlet(LABELS, num_clients, 0.3, 0, 1),
        rules.divide_by_class(LABELS, num_clients, 7 if num_clients < 7 else 3, 1),
    ):
        assert len(clients) == num_clients
        assert_each_exactly_once(clients, 1001)


def test_iid_sizes_differ_by_at_most_one_and_classes_are_mixed():
    clients = rules.divide_iid(1001, 7, 1)
    assert {len(rows) for rows in clients} == {143}
    assert {len(rows) for rows in rules.divide_iid(1001, 13, 1)} == {77}
    assert {len(rows) for rows in rules.divide_iid(1001, 17, 1)} == {58, 59}
    assert np.all(counts(clients)[:, [0, 2, 5, 6, 7]] > 0)


def test_dirichlet_agrees_with_flower_datasets_up_to_rounding():
    import datasets
    from flwr_datasets.partitioner import DirichletPartitioner

    labels = LABELS[LABELS != 3]
    theirs = DirichletPartitioner(
        13, "label", 0.7, 0, shuffle=False, seed=derive_seed(5, "partition-dirichlet")
    )
    theirs.dataset = datasets.Dataset.from_dict({"label": labels})
    ours = rules.divide_dirichlet(np.unique(labels, return_inverse=True)[1], 13, 0.7, 0, 5)
    expected = [
        np.bincount(np.asarray(theirs.load_partition(k)["label"]), minlength=8) for k in range(13)
    ]
    assert np.abs(counts(ours, labels) - expected).max() == 1


def test_dirichlet_heterogeneity_falls_with_alpha():
    # The largest class share of a client, on average over clients.
    labels = np.repeat(np.arange(10), 1009)
    top = []
    for alpha in (0.05, 0.5, 100.0):
        held = counts(rules.divide_dirichlet(labels, 11, alpha, 1, 1), labels)
        top.append((held.max(axis=1) / held.sum(axis=1)).mean())
    assert top[0] > 0.5 > top[1] > 0.2 > 0.13 > top[2] >= 0.1


def test_no_client_is_favoured_by_rounding():
    # With alpha so small that a class has one holder or two, the last client would hold
    # one example of every class if cuts were rounded down.
    labels = np.repeat(np.arange(101), 31)
    held = counts(rules.divide_dirichlet(labels, 53, 0.001, 0, 1), labels)
    classes = (held > 0).sum(axis=1)
    assert classes.sum() <= 130
    assert classes.max() <= 8


def test_dirichlet_floor_is_kept_by_drawing_again():
    without = rules.divide_dirichlet(LABELS, 29, 0.2, 0, 3)
    with_floor = rules.divide_dirichlet(LABELS, 29, 0.2, 5, 3)
    assert min(map(len, without)) < 5 <= min(map(len, with_floor))
    assert_each_exactly_once(with_floor, 1001)


def test_impossible_dirichlet_floor_ends_in_an_error_that_names_the_remedies():
    labels = np.repeat(np.arange(10), 5003)
    with pytest.raises(ConfigError, match="raise alpha, use fewer clients, or lower min-part"):
        rules.divide_dirichlet(labels, 100, 0.01, 1, 1)
    clients = rules.divide_dirichlet(labels, 100, 0.01, 0, 1)
    assert_each_exactly_once(clients, 50030)


def test_shard_gives_each_client_exactly_its_number_of_classes():
    for num_clients, per_client in ((7, 1), (10, 2), (31, 3), (5, 7), (200, 1)):
        held = counts(rules.divide_by_class(LABELS, num_clients, per_client, 1)) > 0
        assert np.all(held.sum(axis=1) == per_client)
        assert np.all(held.any(axis=0) == (SIZES > 0))


def test_shard_sizes_are_near_equal_where_classes_are_equal():
    labels = np.repeat(np.arange(10), 101)
    assert {len(rows) for rows in rules.divide_by_class(labels, 10, 2, 1)} == {100, 101, 102}


def test_large_classes_are_cut_into_more_shards():
    holders = (counts(rules.divide_by_class(LABELS, 31, 3, 1)) > 0).sum(axis=0)
    # 93 shards; a client holds a class once, so none has more than 31.
    assert holders.tolist() == [10, 5, 22, 0, 1, 16, 8, 31]


@pytest.mark.parametrize(
    ("num_clients", "per_client", "message"),
    [
        (5, 8, "classes-per-client must be <= 7, the number of classes, got 8"),
        (3, 2, "can hold only 6 of 7 classes; raise one"),
        (300, 6, "needs 1800 shards, but the classes can be cut into"),
    ],
)
def test_impossible_shards_are_refused(num_clients, per_client, message):
    with pytest.raises(ConfigError, match=message):
        rules.divide_by_class(LABELS, num_clients, per_client, 1)


def test_natural_gives_each_client_one_writer():
    clients = rules.divide_natural(LABELS, 100, 1, 1)
    assert_each_exactly_once(clients, 1001)
    assert [set(LABELS[rows]) for rows in clients] == [{0}, {1}, {2}, {4}, {5}, {6}, {7}]


def test_natural_with_more_writers_than_clients_is_a_seeded_choice_of_large_enough_ones():
    def chosen(num_clients, floor, seed):
        clients = rules.divide_natural(LABELS, num_clients, floor, seed)
        assert all(len(rows) == SIZES[LABELS[rows[0]]] for rows in clients)
        return [int(LABELS[rows[0]]) for rows in clients]

    assert chosen(100, 83, 1) == [0, 2, 5, 6, 7]
    draws = {tuple(chosen(3, 8, seed)) for seed in range(29)}
    assert len(draws) > 5 and chosen(3, 8, 11) == chosen(3, 8, 11)
    assert set().union(*draws) == {0, 1, 2, 5, 6, 7}
    with pytest.raises(ConfigError, match=r"the most is 397\); lower min-partition-size"):
        chosen(3, 398, 1)


def test_rules_follow_the_seed_alone():
    def digest(seed):
        parts = [
            *rules.divide_iid(1001, 7, seed),
            *rules.divide_dirichlet(LABELS, 7, 0.5, 1, seed),
            *rules.divide_by_class(LABELS, 7, 2, seed),
        ]
        return np.concatenate(parts).tolist()

    first = digest(1)
    np.random.seed(99)
    assert digest(1) == first != digest(2)


@pytest.mark.parametrize("num_clients", [1000, 10_000])
def test_thousands_of_clients_cover_everything(num_clients):
    labels = np.repeat(np.arange(100), 503)
    for clients in (
        rules.divide_dirichlet(labels, num_clients, 0.5, 0, 1),
        rules.divide_by_class(labels, num_clients, 2, 1),
        rules.divide_iid(len(labels), num_clients, 1),
    ):
        assert len(clients) == num_clients
        assert_each_exactly_once(clients, 50300)
