# tokenmill on an Ascend NPU, as a worker of Prefect. It has not been built or run: no NPU was at
# hand. The tag of the base decides the CANN version and the chip (910b, or a3 for a 910C); take the
# one that the table of https://github.com/Ascend/pytorch names for the torch_npu of pyproject.toml,
# with Python 3.11. Base, torch and torch_npu are there for x86-64 and aarch64, and nothing below
# names one of them: the image is for the kind of host that builds it.
#   docker build -f docker/npu.Dockerfile --build-arg CANN_TAG=VERSION-910b-ubuntu22.04-py3.11 .
ARG CANN_TAG
FROM quay.io/ascend/cann:${CANN_TAG}

# torch for the CPU: torch_npu refuses one that is built for CUDA, as those of PyPI are.
ARG PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/tokenmill

# Without CANN's driver, which the host brings, torch_npu cannot be loaded by itself.
ENV TORCH_DEVICE_BACKEND_AUTOLOAD=0
COPY pyproject.toml constraints.txt README.md LICENSE ./
# CANN compiles operators with Python packages of the base, which the environment must see too.
RUN python3 -m venv --system-site-packages /opt/venv \
    && mkdir engine flows \
    && touch engine/__init__.py flows/__init__.py \
    && /opt/venv/bin/pip install ${PIP_FLAGS} -c constraints.txt -e '.[npu]' \
    && /opt/venv/bin/python -c 'import torch; assert torch.version.cuda is None, "PIP_FLAGS names no index with torch for the CPU"'

COPY engine engine
COPY flows flows
COPY deployments deployments
COPY configs configs

# The group of the device files of the host's driver is HwHiAiUser, 1000 unless it was changed.
ARG DRIVER_GID=1000
RUN groupadd --force --non-unique --gid ${DRIVER_GID} npu-driver \
    && useradd --uid 10001 --create-home --groups npu-driver tokenmill \
    && install -d -o tokenmill -g tokenmill /opt/tokenmill/runs

ENV PATH="/opt/venv/bin:$PATH" \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    DO_NOT_TRACK=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    PREFECT_WORKER_WEBSERVER_HOST=127.0.0.1
USER 10001
VOLUME /opt/tokenmill/runs

HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/health', timeout=5)"]
# What every process of the container needs: the profile of the base, CANN, whose folder depends on
# its version, and the acceleration library, where the base has it.
ENTRYPOINT ["bash", "-lc", "for script in /usr/local/Ascend/cann/set_env.sh /usr/local/Ascend/ascend-toolkit/set_env.sh; do if [ -r $script ]; then source $script; break; fi; done; script=/usr/local/Ascend/nnal/atb/set_env.sh; if [ -r $script ]; then source $script; fi; exec \"$@\"", "--"]
CMD ["/opt/venv/bin/python", "deployments/worker.py", "--pool", "tokenmill", "--type", "process", "--with-healthcheck"]
