# Baton on NVIDIA GPUs with CUDA 13 (driver 580 or newer); from the repository's root:
#   docker build -f deploy/docker/cuda.Dockerfile -t baton:cuda .
#   docker run --rm --gpus all --ulimit memlock=-1 --shm-size=256m --stop-timeout=90 \
#     -p 127.0.0.1:8000:8000 -v models:/models baton:cuda baton serve Qwen/Qwen3-8B --host 0.0.0.0
# Over RDMA add --device=/dev/infiniband and --network=host. The rest is as in cpu.Dockerfile.
# `devel`, at run time too: FlashInfer compiles its kernels with nvcc on first use, and Triton needs a C compiler.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04 AS base
# libcurl4t64, libibverbs1, ibverbs-providers (libmlx5), libnuma1: Mooncake's engine is linked against them.
# procps, rsync: Ray's launcher uses them. profile.d: and login shells, which forget ENV PATH.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ ibverbs-providers libcurl4t64 libibverbs1 libnuma1 procps \
    python3 python3-dev python3-venv rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && echo 'export PATH=/opt/baton/bin:$PATH' > /etc/profile.d/baton.sh
ENV PATH=/opt/baton/bin:$PATH \
    BATON_CACHE_DIR=/opt/baton/cache \
    HF_HOME=/models \
    PYTHONUNBUFFERED=1

FROM base AS build
WORKDIR /source
RUN python3 -m venv /opt/baton
# The packages first: this layer stays while the sources change.
COPY deploy/docker/cuda.lock ./
RUN pip install --no-cache-dir --no-deps --requirement cuda.lock
COPY . ./
RUN pip install --no-cache-dir --no-deps . && pip check
# Outside the sources, so that the installed packages are compiled.
WORKDIR /
RUN python -m engine.cpu.build && python -m kvcache.native.build && python -m router.index.native.build

FROM base
# Ubuntu's image has a user 1000 of its own.
RUN userdel --remove ubuntu && useradd --uid 1000 --create-home baton \
 && install --directory --owner=baton /models /etc/baton /home/baton/.ray
COPY --from=build /opt/baton /opt/baton
COPY deploy /opt/baton/deploy
# Ray's launcher reads HOME from the image.
ENV HOME=/home/baton
USER 1000
WORKDIR /home/baton
VOLUME /models
EXPOSE 8000
# The router answers 200 while its event loop runs. Kubernetes ignores this and uses KubeRay's probes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["wget", "--quiet", "--tries=1", "--timeout=4", "--output-document=/dev/null", "http://127.0.0.1:8000/health"]
CMD ["baton", "serve", "/opt/baton/deploy/demo.yaml", "--host", "0.0.0.0"]
