"""The rows of the table of settings that say what the server offers, and to whom: HTTP, gRPC, frames and metrics."""

from __future__ import annotations

from edge_server.config.kinds import (
    BOOLEAN,
    COUNT,
    OPTIONAL_PATH,
    OPTIONAL_TEXT,
    PATTERN,
    PORT,
    RESTRICTED,
    TEXT,
    choice,
    integer,
)
from edge_server.config.setting import Setting

HTTP = (
    Setting("http.is_enabled", "--allow-http", BOOLEAN, "Offer HTTP."),
    Setting("http.address", "--http-address", TEXT, "Address that HTTP listens on; 0.0.0.0 opens it to the network."),
    Setting("http.port", "--http-port", PORT, "Port of HTTP; 0 lets the system choose."),
    Setting("http.reuses_port", "--reuse-http-port", BOOLEAN, "Let other processes listen on the HTTP port too."),
    Setting(
        "http.max_input_size_bytes",
        "--http-max-input-size",
        integer(1, 2**40),
        "Largest HTTP input in bytes, also after decompression.",
    ),
    Setting(
        "http.max_body_bytes_in_flight",
        "--http-max-body-bytes-in-flight",
        integer(0, 2**50),
        "Most bytes of HTTP bodies and gRPC messages, all together, that have come but are no requests yet; beyond, "
        "those that hold most for longest are refused. 0: a quarter of the memory that is available at the start, at "
        "least 256 MiB, and room for one gRPC message of any size if the machine has that.",
    ),
    Setting(
        "http.max_connections",
        "--http-max-connections",
        integer(0, 2**20),
        "Most HTTP connections open at a time; beyond, the longest idle one is closed for a new one, or the new one "
        "is answered 503. 0: half of the files that the process may have open, at most 4096.",
    ),
    Setting(
        "http.header_pattern",
        "--http-header-forward-pattern",
        PATTERN,
        "Request headers whose whole name matches, in any case, become request parameters.",
    ),
    Setting(
        "http.restricted",
        "--http-restricted-api",
        RESTRICTED,
        "Answer these endpoint categories only to requests with header key=value. Repeatable.",
        separator=" ",
    ),
    Setting(
        "http.allowed_hosts",
        "--http-allowed-host",
        TEXT,
        "Host name under which browsers reach this server, as behind a proxy. Orders from a web page are taken only "
        "under an address, localhost, this machine's names, or this. Repeatable.",
        separator=",",
    ),
    Setting("http.tls_cert", "--http-tls-cert", OPTIONAL_PATH, "PEM file of the HTTPS certificate chain."),
    Setting("http.tls_key", "--http-tls-key", OPTIONAL_PATH, "PEM file of the HTTPS private key."),
    Setting(
        "http.client_ca",
        "--https-client-ca",
        OPTIONAL_PATH,
        "PEM file of who may sign client certificates; with it, HTTPS asks every client for one.",
    ),
)

GRPC = (
    Setting("grpc.is_enabled", "--allow-grpc", BOOLEAN, "Offer gRPC."),
    Setting("grpc.address", "--grpc-address", TEXT, "Address that gRPC listens on; 0.0.0.0 opens it to the network."),
    Setting("grpc.port", "--grpc-port", PORT, "Port of gRPC; 0 lets the system choose."),
    Setting("grpc.reuses_port", "--reuse-grpc-port", BOOLEAN, "Let other processes listen on the gRPC port too."),
    Setting(
        "grpc.transport",
        "--grpc-transport",
        choice("http2", "grpcio"),
        "Carry gRPC by the server's own HTTP/2, or by the server of the library grpcio.",
    ),
    Setting(
        "grpc.compression_level",
        "--grpc-infer-response-compression-level",
        choice("none", "low", "medium", "high"),
        "How hard inference responses are compressed.",
    ),
    Setting(
        "grpc.header_pattern",
        "--grpc-header-forward-pattern",
        PATTERN,
        "Request metadata whose whole name matches, in any case, become request parameters.",
    ),
    Setting(
        "grpc.restricted",
        "--grpc-restricted-protocol",
        RESTRICTED,
        "Answer these categories only to requests with metadata triton-grpc-protocol-<key>=<value>. Repeatable.",
        separator=" ",
    ),
    Setting("grpc.is_tls", "--grpc-use-ssl", BOOLEAN, "Encrypt gRPC; needs certificate and key."),
    Setting(
        "grpc.is_mutual_tls",
        "--grpc-use-ssl-mutual",
        BOOLEAN,
        "Encrypt gRPC and ask clients for a certificate; needs the root certificate too.",
    ),
    Setting("grpc.server_cert", "--grpc-server-cert", OPTIONAL_PATH, "PEM file of the gRPC certificate chain."),
    Setting("grpc.server_key", "--grpc-server-key", OPTIONAL_PATH, "PEM file of the gRPC private key."),
    Setting("grpc.root_cert", "--grpc-root-cert", OPTIONAL_PATH, "PEM file of who may sign client certificates."),
    Setting(
        "grpc.keepalive_time_ms",
        "--grpc-keepalive-time",
        COUNT,
        "Milliseconds of silence after which the server pings a client.",
    ),
    Setting(
        "grpc.keepalive_timeout_ms",
        "--grpc-keepalive-timeout",
        COUNT,
        "Milliseconds to wait for the answer to a ping before closing.",
    ),
    Setting(
        "grpc.keepalive_permit_without_calls",
        "--grpc-keepalive-permit-without-calls",
        BOOLEAN,
        "Allow pings while no call is running.",
    ),
    Setting(
        "grpc.http2_max_pings_without_data",
        "--grpc-http2-max-pings-without-data",
        COUNT,
        "Pings that may be sent with no data in between.",
    ),
    Setting(
        "grpc.http2_min_recv_ping_interval_without_data_ms",
        "--grpc-http2-min-recv-ping-interval-without-data",
        COUNT,
        "Milliseconds that must lie between two pings of a client with no data in between.",
    ),
    Setting(
        "grpc.http2_max_ping_strikes",
        "--grpc-http2-max-ping-strikes",
        COUNT,
        "Bad pings of a client before its connection is closed; 0: any number.",
    ),
    Setting(
        "grpc.max_connection_age_ms",
        "--grpc-max-connection-age",
        COUNT,
        "Milliseconds a connection may live; 0: for ever.",
    ),
    Setting(
        "grpc.max_connection_age_grace_ms",
        "--grpc-max-connection-age-grace",
        COUNT,
        "Milliseconds that calls have to end on a connection past its age; 0: for ever.",
    ),
)

AUTH = (
    Setting(
        "auth.tokens_file",
        "--auth-tokens-file",
        OPTIONAL_PATH,
        "File of bearer tokens, for HTTP and gRPC: a line has a name, the SHA-256 of the token, and the categories it "
        "opens (* for all). Closes the ordering categories, and those that a line names. Read again at SIGHUP.",
    ),
)

METRICS = (
    Setting("metrics.is_enabled", "--allow-metrics", BOOLEAN, "Offer Prometheus metrics."),
    Setting("metrics.has_cpu_metrics", "--allow-cpu-metrics", BOOLEAN, "Include processor load and memory."),
    Setting("metrics.has_gpu_metrics", "--allow-gpu-metrics", BOOLEAN, "Include GPU load, memory and power."),
    Setting("metrics.address", "--metrics-address", OPTIONAL_TEXT, "Address of metrics; empty: the HTTP address."),
    Setting("metrics.port", "--metrics-port", PORT, "Port of metrics; 0 lets the system choose."),
    Setting(
        "metrics.interval_ms",
        "--metrics-interval-ms",
        integer(1, 3_600_000),
        "Milliseconds between two readings of processor and GPU.",
    ),
)

FRAMES = (
    Setting(
        "frames.max_streams",
        "--frames-max-streams",
        integer(0, 768),
        "How many frame streams may be open at once; 0: none is taken.",
    ),
    Setting(
        "frames.max_frame_bytes",
        "--frames-max-frame-bytes",
        integer(1, 2**31 - 1),
        "Bytes that one frame of a stream may have.",
    ),
)
