from benchmarks.service_load import Interference

from pdserve.bench.record import Arrival, RequestRecord


def record(sent_s, *arrivals_s):
    arrivals = tuple(Arrival(at_s, 1) for at_s in arrivals_s)
    return RequestRecord(sent_s, sent_s, arrivals_s[-1], arrivals, 8, len(arrivals))


def test_gaps_are_disturbed_from_the_arrival_to_the_last_first_token():
    streams = [record(0, 1.0, 2.0, 3.0, 4.5, 6.5, 7.0), record(0, 1.5, 2.5, 3.5, 8.0)]
    arrived = [record(3.25, 4.0), record(3.25, 6.0, 9.0)]
    found = Interference(streams, arrived)
    assert found.calm_gaps_s == [1.0, 1.0, 1.5, 1.0, 1.0]
    assert found.disturbed_gaps_s == [1.5, 2.0, 1.0, 4.5]
    assert found.is_covered


def test_the_start_of_the_streams_is_not_calm():
    streams = [record(0, 1.0, 5.0, 6.0, 7.0), record(0, 5.5, 6.5, 7.5)]
    found = Interference(streams, [record(6.75, 7.0)])
    assert found.calm_gaps_s == [1.0, 1.0, 1.0, 1.0]


def test_streams_that_end_too_early_are_told():
    assert not Interference([record(0, 1.0, 2.0)], [record(1.5, 3.0)]).is_covered
