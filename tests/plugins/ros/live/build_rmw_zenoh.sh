#!/bin/sh
# Build rmw_zenoh_cpp, which PyPI lacks, for the environments of fetch_rclpy.sh:
#
#     eval "$(tests/plugins/ros/live/build_rmw_zenoh.sh RCLPY SOURCES)"
#     python -m pytest -m long tests/plugins/ros/live/test_live_zenoh.py
#
# Its own library of Zenoh is in Rust and needs packages of crates.io. Here it gets Zenoh's library in C instead, over the
# same C++ interface: names, tokens, attachments, messages and the graph are rmw_zenoh's own code, and its sessions are
# clients, not peers. SOURCES is a folder with clones, from https://github.com:
#
#     git clone -b release/jazzy/rmw_zenoh_cpp/0.2.10-1 ros2-gbp/rmw_zenoh-release rmw_zenoh_jazzy
#     git clone -b release/kilted/rmw_zenoh_cpp/0.6.7-1 ros2-gbp/rmw_zenoh-release rmw_zenoh_kilted
#     git clone -b 1.9.0 eclipse-zenoh/zenoh-cpp
#     git clone -b 1.9.0 eclipse-zenoh/zenoh-pico
#
# Needs g++ and cmake; takes about two minutes. A second call builds nothing. Prints an export line for the shell.
set -eu

[ $# -eq 2 ] || { echo "usage: $0 RCLPY SOURCES" >&2; exit 2; }
rclpy=$(cd "$1" && pwd)
sources=$(cd "$2" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
built=$sources/built

build_zenoh() {
    # Messages of up to 20 MB, and all that rmw_zenoh uses.
    cmake -S "$sources/zenoh-pico" -B "$built/zenoh-pico" -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
        -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DBUILD_EXAMPLES=OFF -DBUILD_TESTING=OFF -DBUILD_TOOLS=OFF \
        -DZ_FEATURE_UNSTABLE_API=1 -DZ_FEATURE_ADVANCED_PUBLICATION=1 -DZ_FEATURE_ADVANCED_SUBSCRIPTION=1 \
        -DZ_FEATURE_LOCAL_SUBSCRIBER=1 -DZ_FEATURE_LOCAL_QUERYABLE=1 \
        -DBATCH_UNICAST_SIZE=65535 -DFRAG_MAX_SIZE=20000000
    cmake --build "$built/zenoh-pico" -j 2
    cmake --install "$built/zenoh-pico" --prefix "$built/zenoh"
}

# build_rmw DISTRIBUTION
build_rmw() {
    prefix=$rclpy/$1
    work=$built/$1
    mkdir -p "$work/objects" "$work/share/ament_index/resource_index/packages"
    cp -r "$sources/rmw_zenoh_$1/." "$work/source"
    sed -i 's/zenoh::Config::from_file(/pico_config(/
        s/config.insert_json5(key, val, &result)/pico_override(config, key, val, \&result)/' \
        "$work/source/src/detail/zenoh_config.cpp"
    sed -i 's/session.obtain_shm_provider()/pico_no_shared_memory()/' "$work/source/src/detail/zenoh_utils.cpp"
    # Zenoh's library in C never ends this query of the graph. The subscriber that follows asks for the same.
    sed -i 's/config.value().get(/pico_get(/
        s/config.value().insert_json5(\(.*\)/(void)std::make_pair(\1/
        /zenoh::Session::GetOptions options = /,/Initialize the shm subsystem/d' \
        "$work/source/src/detail/rmw_context_impl_s.cpp"
    set -- "-I$prefix/include" "-I$built/zenoh/include" "-I$sources/zenoh-cpp/include" \
        "-I$work/source/include" "-I$work/source/src" -include "$here/zenoh_pico_for_rmw.hxx"
    for folder in "$prefix"/include/*/; do
        set -- "$@" "-I$folder"
    done
    version=$(sed -n 's|.*<version>\(.*\)</version>.*|\1|p' "$prefix/share/rmw/package.xml" | tr . ' ')
    # shellcheck disable=SC2046,SC2086
    set -- "$@" $(printf -- '-DRMW_VERSION_MAJOR=%s -DRMW_VERSION_MINOR=%s -DRMW_VERSION_PATCH=%s' $version)
    # shellcheck disable=SC2016
    find "$work/source/src" -name '*.cpp' ! -name 'rmw_test_fixture.cpp' ! -path '*/zenohd/*' | sort |
        xargs -P 2 -I '{}' sh -c 'source=$1; objects=$2; shift 2
            g++ -std=c++17 -O1 -fPIC -DZENOHCXX_ZENOHPICO -DZENOH_LINUX -DZ_FEATURE_UNSTABLE_API=1 "$@" \
                -c "$source" -o "$objects/$(basename "$source" .cpp).o"' sh '{}' "$work/objects" "$@"
    tracing=$(find "$prefix" -name 'liblttng-ust-*' -exec dirname '{}' ';' -quit)
    g++ -shared -o "$work/librmw_zenoh_cpp.so" "$work"/objects/*.o "-L$prefix/lib" "$built/zenoh/lib/libzenohpico.a" \
        -lrmw -lrcutils -lrcpputils -lament_index_cpp -l:libfastcdr.so.2 -lrosidl_runtime_c \
        -lrosidl_typesupport_fastrtps_c -lrosidl_typesupport_fastrtps_cpp -ltracetools \
        -Wl,--no-undefined -Wl,--disable-new-dtags "-Wl,-rpath,$prefix/lib:${tracing:-$prefix/lib}"
    touch "$work/share/ament_index/resource_index/packages/rmw_zenoh_cpp"
}

mkdir -p "$built"
[ -e "$built/complete" ] || {
    { build_zenoh && build_rmw jazzy && build_rmw kilted; } >"$built/log" 2>&1 || { tail -50 "$built/log" >&2; exit 1; }
    touch "$built/complete"
}
printf "export EDGE_TEST_RCLPY='%s' EDGE_TEST_RMW_ZENOH='%s'\n" "$rclpy" "$built"
