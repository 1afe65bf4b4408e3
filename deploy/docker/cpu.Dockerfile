# Baton on CPUs; from the repository's root:
#   docker build -f deploy/docker/cpu.Dockerfile -t baton:cpu .
#   docker run --rm --shm-size=256m --stop-timeout=90 -p 127.0.0.1:8000:8000 -v models:/models baton:cpu \
#     baton serve Qwen/Qwen3-0.6B --host 0.0.0.0
# --shm-size: Ray's object store takes 100 MiB, docker gives 64. --stop-timeout: docker waits 10 s, a drain takes 60.
# `ray up` with docker and KubeRay start Ray in it: they need bash, ray in PATH and wget. /models keeps what
# Hugging Face downloads. Every node of a cluster needs the same image: Ray's versions must agree, and ours.
FROM python:3.11-slim-bookworm AS base
# g++: a kernel's name in the cache has the compiler's version in it, so the compiler must be there when it is used, too.
# libcurl4, libibverbs1, libnuma1: Mooncake's engine is linked against them.
# procps, rsync: Ray's launcher uses them. profile.d: and login shells, which forget ENV PATH.
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ libcurl4 libibverbs1 libnuma1 procps rsync wget \
 && rm -rf /var/lib/apt/lists/* \
 && echo 'export PATH=/opt/baton/bin:$PATH' > /etc/profile.d/baton.sh
ENV PATH=/opt/baton/bin:$PATH \
    BATON_CACHE_DIR=/opt/baton/cache \
    HF_HOME=/models \
    PYTHONUNBUFFERED=1

FROM base AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
RUN python -m venv /opt/baton
# torch first and alone: pip's own index would bring gigabytes of CUDA. This layer stays while the sources change.
COPY requirements.lock ./
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements.lock)"
COPY . ./
RUN pip install --no-cache-dir --constraint requirements.lock ".[cpu]"
# Outside the sources, so that the installed packages are compiled.
WORKDIR /
RUN python -m engine.cpu.build && python -m kvcache.native.build && python -m router.index.native.build

FROM base
RUN useradd --uid 1000 --create-home baton \
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
