"""The least that a warm run has to do, by PyArrow: reads the text column of a Parquet file and writes it back, cut into as many rows as the run writes.

    python pyarrow_copy.py INPUT OUTPUT ROWS THREADS

Prints the seconds it took. Cuts are made at equal distances without looking at the text, by new offsets over the same bytes; ids are not copied.
"""

import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def slices(text: pa.LargeStringArray, rows: int) -> pa.LargeStringArray:
    """The same bytes in about `rows` rows."""
    _, offsets, data = text.buffers()
    offsets = np.frombuffer(offsets, dtype=np.int64)[text.offset : text.offset + len(text) + 1]
    each = max(1, round(rows / len(text)))
    starts, lengths = offsets[:-1], np.diff(offsets)
    cuts = starts[:, None] + (lengths[:, None] * np.arange(each)[None, :]) // each
    new = np.append(cuts.reshape(-1), offsets[-1]).astype(np.int64)
    return pa.LargeStringArray.from_buffers(len(new) - 1, pa.py_buffer(new), data)


def copy(source: str, target: str, rows: int) -> float:
    began = time.perf_counter()
    file = pq.ParquetFile(source, memory_map=True)
    share = rows / file.metadata.num_rows
    schema = pa.schema([("text", pa.large_string())])
    with pq.ParquetWriter(target, schema, compression="zstd") as writer:
        for batch in file.iter_batches(batch_size=8192, columns=["text"], use_threads=True):
            text = batch.column(0).cast(pa.large_string())
            cut = slices(text, round(share * len(text)))
            writer.write_batch(pa.record_batch([cut], schema=schema))
    return time.perf_counter() - began


if __name__ == "__main__":
    source, target, rows, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    pa.set_cpu_count(threads)
    pa.set_io_thread_count(threads)
    print(copy(source, target, rows))
