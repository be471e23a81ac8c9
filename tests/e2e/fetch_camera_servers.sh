#!/bin/sh
# Fetch GStreamer's RTSP server and the MQTT broker Mosquitto into a folder, on Debian or Ubuntu, without root:
#
#     eval "$(tests/e2e/fetch_camera_servers.sh DEST)" && python -m pytest -m full tests/plugins/cameras
#
# The libraries that they need and a bare system lacks come with them; the system's python3 runs the RTSP server. A
# second call with the same DEST fetches nothing. Prints export lines for the shell.
set -eu

[ $# -eq 1 ] || { echo "usage: $0 DEST" >&2; exit 2; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
packages="libgstreamer1.0-0 libgstreamer-plugins-base1.0-0 libgstreamer-plugins-bad1.0-0 libgstrtspserver-1.0-0
    gir1.2-gstreamer-1.0 gir1.2-gst-plugins-base-1.0 gir1.2-gst-rtsp-server-1.0
    gstreamer1.0-plugins-base gstreamer1.0-plugins-good gstreamer1.0-plugins-bad gstreamer1.0-plugins-ugly
    liborc-0.4-0 libx264-164 libunwind8 libdw1 libcap2
    python3-gi libgirepository-1.0-1 gir1.2-glib-2.0
    mosquitto libcjson1 libdlt2 libmosquitto1 libwrap0 libwebsockets17 libev4 libuv1"

download() {
    # shellcheck disable=SC2086
    apt-get download -q $packages >&2
}

if [ ! -e "$dest/complete" ]; then
    (
        cd "$dest"
        # A fresh machine has no package lists yet.
        download || { apt-get update >&2 && download; }
        for package in *.deb; do
            dpkg -x "$package" .
            rm "$package"
        done
        # The other plugins want libraries that are not here, and say so at each start.
        find usr/lib -path '*/gstreamer-1.0/lib*.so' ! -name 'libgstapp.so' ! -name 'libgstcoreelements.so' \
            ! -name 'libgstjpeg.so' ! -name 'libgstrtp.so' ! -name 'libgstrtpmanager.so' ! -name 'libgstrtsp.so' \
            ! -name 'libgsttcp.so' ! -name 'libgstudp.so' ! -name 'libgstvideo*.so' ! -name 'libgstx264.so' -delete
        find usr/lib -path '*/gstreamer-1.0/libgstvideo4linux2.so' -delete
        touch complete
    )
fi

libraries=$(find "$dest/usr/lib" -name '*.so*' -not -path '*/python3/*' -exec dirname {} + | sort -u | paste -s -d:)
LD_LIBRARY_PATH="$libraries" "$dest/usr/sbin/mosquitto" -h >&2 || [ $? -lt 126 ] ||
    { echo "$0: the packages hold no mosquitto that runs" >&2; exit 1; }
printf "export EDGE_TEST_CAMERA_SERVERS='%s'\n" "$dest"
printf "export EDGE_TEST_CAMERA_SERVER_LIBRARIES='%s'\n" "$libraries"
