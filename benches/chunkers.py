"""Chunkers in use beside ours, each with the parameter that is best on the calibration streams (docs/evidence.md).

    python chunkers.py RIGHT_RESET PIPELINE ENCODER_FOLDER CALIBRATION.jsonl EVALUATION.jsonl OUTPUT_FOLDER [EVAL_ARGUMENTS...]

Needs chonkie, langchain-experimental, langchain-huggingface, sentence-transformers and semantic-text-splitter. Streams have `id`, `text` and
`record_byte_starts`. Writes chunk files and ends with the arguments that give the best of each to `right-reset eval`, which it then runs.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import warnings

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
warnings.filterwarnings("ignore")


def chonkie(encoder):
    from chonkie import SemanticChunker
    from chonkie.embeddings import SentenceTransformerEmbeddings

    embeddings = SentenceTransformerEmbeddings(encoder)
    for threshold in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8):
        for window in (1, 3):
            chunker = SemanticChunker(embedding_model=embeddings, threshold=threshold, chunk_size=384, similarity_window=window, min_sentences_per_chunk=1)
            yield f"chonkie threshold {threshold} window {window}", lambda text, c=chunker: [chunk.text for chunk in c.chunk(text)]


def langchain(encoder):
    from langchain_experimental.text_splitter import SemanticChunker
    from langchain_huggingface import HuggingFaceEmbeddings

    embeddings = HuggingFaceEmbeddings(model_name=encoder)
    for amount in (70, 75, 80, 85, 90, 95):
        chunker = SemanticChunker(embeddings, breakpoint_threshold_type="percentile", breakpoint_threshold_amount=amount)
        yield f"langchain percentile {amount}", chunker.split_text


def text_splitter(encoder):
    from semantic_text_splitter import TextSplitter
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(pathlib.Path(encoder) / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for capacity in (128, 160, 192, 224, 256, 320, 384):
        splitter = TextSplitter.from_huggingface_tokenizer(tokenizer, capacity)
        yield f"text-splitter capacity {capacity}", splitter.chunks


def starts(text, chunks):
    """The byte at which each chunk begins. Chunkers trim and re-join: pieces are looked for from where the last one ended."""
    found, at = [], 0
    for chunk in chunks:
        piece = chunk.strip()
        place = text.find(piece[:40], at)
        if place < 0:
            raise SystemExit(f"a chunk is not in its text: {piece[:60]!r}")
        found.append(len(text[:place].encode()))
        at = place + max(1, len(piece) - 40)
    return [0] + [start for start in found if start > 0]


def main(program, pipeline, encoder, calibration, evaluation, output, *arguments):
    out = pathlib.Path(output)
    out.mkdir(parents=True, exist_ok=True)
    read = lambda path: [json.loads(line) for line in open(path, encoding="utf-8")]
    fixed = ["--gold", "record_byte_starts"]

    def write(name, split, streams):
        path = out / f"{name.replace(' ', '_')}-{split}.jsonl"
        began = time.time()
        with open(path, "w", encoding="utf-8") as file:
            for stream in streams:
                for start in starts(stream["text"], ways[name](stream["text"])):
                    file.write(json.dumps({"doc_id": stream["id"], "byte_start": start}) + "\n")
        return path, time.time() - began

    best = []
    for chunker in (chonkie, langchain, text_splitter):
        ways = dict(chunker(encoder))
        streams = read(calibration)
        chunks = [argument for name in ways for argument in ("--chunks", f"{name}={write(name, 'calibration', streams)[0]}")]
        command = [program, "eval", pipeline, "--input", calibration, *fixed, "--methods", "sentence", "--resamples", "1", "--json", *chunks]
        rows = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)["methods"][1:]
        value = lambda row: tuple(row["measures"][key]["value"] for key in ("clean_unit_recovery", "partition_f1"))
        chosen = max(rows, key=value)
        path, seconds = write(chosen["method"], "evaluation", read(evaluation))
        print(f"{chosen['method']}: {value(chosen)[0]:.3f}, {value(chosen)[1]:.3f} on the calibration streams; {seconds:.1f} s for the evaluation streams", file=sys.stderr)
        best += ["--chunks", f"{chosen['method']}={path}"]
    subprocess.run([program, "eval", pipeline, "--input", evaluation, *fixed, *arguments, *best], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
