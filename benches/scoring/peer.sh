#!/bin/sh
# Prints the command of the PyTorch peer, in a virtual environment of its own (target/peer, about 5 GB). Where that cannot be made it prints nothing, and says why.
cd "$(dirname "$0")/../.." || exit 0
home="${CARGO_TARGET_DIR:-target}/peer"
if ! "$home/bin/python" -c "import torch, transformers, gguf" 2>/dev/null; then
    echo "installing PyTorch for the peer in $home" >&2
    if ! { python3 -m venv "$home" && "$home/bin/pip" install --quiet torch transformers gguf numpy; } >&2; then
        echo "no peer: PyTorch could not be installed" >&2
        exit 0
    fi
fi
echo "$home/bin/python benches/scoring/peer.py"
