# An image that trains: the packages that requirements.lock pins, and samewise's wheel.
#
#   docker build -t samewise .
#   docker run --rm --user "$(id -u):$(id -g)" -v "$PWD:/work" -v samewise:/home/samewise \
#       samewise train experiment=resnet18_digits
#
# Runs go to the current folder; the volume keeps the key that signs them.
#
# The locked torch brings CUDA's libraries, and computes on a CPU as well; `docker run --gpus all`
# lets it use GPUs. Build arguments:
#
#   TORCH_INDEX=URL   for a CPU alone: torch in the locked version from an index of builds without
#                     CUDA (pytorch.org names it), 4 GB less. The lock has no hashes of these.
#   BASE=IMAGE        another image of Debian or Ubuntu with Python 3.11 to 3.13 or none, such as
#                     nvidia/cuda:13.0.1-devel-ubuntu24.04, which has CUDA's compilers
ARG BASE=python:3.12-slim

FROM ${BASE} AS base
RUN python3 -c "import ensurepip" 2>/dev/null || { apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*; }

FROM base AS build
ARG TORCH_INDEX=
ENV PATH=/opt/samewise/bin:$PATH PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /source
RUN python3 -m venv /opt/samewise
COPY requirements.lock .
RUN if [ -z "$TORCH_INDEX" ]; then cp requirements.lock chosen.lock; else \
        awk '/^[^ #]/ { left_out = /^(torch(vision|audio)?==|triton==|cuda-|nvidia-)/ \
            && !/^nvidia-ml-py==/ } !left_out' requirements.lock >chosen.lock \
        && sed -nE 's/^(torch(vision|audio)?==[^ ]+).*/\1/p' requirements.lock \
            | xargs pip install --no-deps --index-url "$TORCH_INDEX"; fi \
    && pip install --no-deps --require-hashes -r chosen.lock
COPY . .
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && pip install --no-deps /wheels/samewise-*.whl

FROM base
COPY --from=build /opt/samewise /opt/samewise
ENV PATH=/opt/samewise/bin:$PATH HOME=/home/samewise
RUN useradd --create-home samewise && chmod 1777 /home/samewise && mkdir --mode=1777 /work
USER samewise
WORKDIR /work
ENTRYPOINT ["samewise"]
CMD ["--help"]
