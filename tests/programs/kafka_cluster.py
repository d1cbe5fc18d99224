"""A cluster of Kafka in a process of its own, librdkafka's mock cluster; prints its brokers, and sends what stdin asks for.

A line `N` on stdin sends the next N messages to each of the four partitions; the answer is the number of all so far. The
messages are those of `fill` in docs/streams.md, by their partition and number alone.
"""

import sys

import numpy as np
from confluent_kafka import Producer

MOST = 4000


def main():
    producer = Producer({"test.mock.num.brokers": 1})
    print(",".join(f"{one.host}:{one.port}" for one in producer.list_topics(timeout=30).brokers.values()), flush=True)
    x = np.random.default_rng(0).normal(size=(MOST, 4, 8)).astype("float32")
    sent = 0
    for line in sys.stdin:
        for row in x[sent : sent + int(line)]:
            for partition in range(4):
                value = np.append(row[partition], row[partition].sum() > 0).astype("float32")
                producer.produce("clicks", value.tobytes(), partition=partition)
            producer.poll(0)
            sent += 1
        assert producer.flush(30) == 0
        print(sent, flush=True)


if __name__ == "__main__":
    main()
