# docker build -t sglite . && docker run -p 127.0.0.1:30000:30000 -e SGLITE_API_KEYS=... -v sglite:/home/sglite/.cache sglite
FROM python:3.11-slim
# The compiler is for the CPU kernels, which are compiled on first use for the processor that is there.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 sglite
WORKDIR /opt/sglite
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY sglite ./sglite
RUN pip install --no-cache-dir --constraint constraints.txt '.[otel]'
USER sglite
WORKDIR /home/sglite
# Where a new volume is mounted it takes over this folder's owner; without the folder it would be root's.
RUN mkdir -m 700 .cache
EXPOSE 30000
# Alive, not ready: a model that is being loaded, or an engine that is started again, is no reason to kill the server.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/health', timeout=2)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["sglite", "serve", "--host", "0.0.0.0", "--port", "30000", "--log-format", "json"]
CMD ["--model", "smollm2-135m"]
