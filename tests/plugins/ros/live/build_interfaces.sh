#!/bin/sh
# Build a package of ROS 2 messages and services for rclpy, into an environment of fetch_rclpy.sh:
#
#     build_interfaces.sh PREFIX FOLDER
#
# FOLDER has the package.xml, msg/*.msg and srv/*.srv. The packages it depends on are installed in PREFIX. Only the C and
# Python code is generated, with the type support of Fast DDS: what rclpy loads. Needs gcc; takes about 10 s of one core.
set -eu

[ $# -eq 2 ] || { echo "usage: $0 PREFIX FOLDER" >&2; exit 2; }
prefix=$(cd "$1" && pwd)
folder=$(cd "$2" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$folder/." "$work"

name=$(sed -n 's|.*<name>\(.*\)</name>.*|\1|p' "$work/package.xml")
dependencies=$(sed -n 's|.*<depend>\(.*\)</depend>.*|\1|p' "$work/package.xml" | tr '\n' ' ')
cat >"$work/CMakeLists.txt" <<EOF
cmake_minimum_required(VERSION 3.20)
project($name C CXX)
# A service needs service_msgs, found here so that the folders below are removed from it, too.
foreach(package ament_cmake rosidl_cmake service_msgs $dependencies rosidl_generator_py rosidl_typesupport_fastrtps_c)
  find_package(\${package} REQUIRED)
endforeach()
# Most of the time would go into C++ for nothing.
list(FILTER AMENT_EXTENSIONS_rosidl_generate_idl_interfaces EXCLUDE REGEX cpp)
# The wheels name the include folder of the Python that they were built with.
get_property(targets DIRECTORY PROPERTY IMPORTED_TARGETS)
list(FILTER targets INCLUDE REGEX "generator_py\$")
set_property(TARGET \${targets} PROPERTY INTERFACE_INCLUDE_DIRECTORIES "")
file(GLOB interfaces RELATIVE \${CMAKE_CURRENT_SOURCE_DIR} msg/*.msg srv/*.srv)
rosidl_generate_interfaces($name \${interfaces} DEPENDENCIES $dependencies)
# Compiled as one file each: their headers take longer than their code.
set_target_properties(${name}__rosidl_typesupport_fastrtps_c ${name}__rosidl_typesupport_c
  PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
ament_package()
EOF

# All that the generators use of these is that libraries are shared ones; their own dependencies are many.
for package in ament_cmake_ros ament_cmake_ros_core; do
    echo "set(${package}_FOUND TRUE)" >"$work/Find$package.cmake"
done

export PATH="$prefix/bin:$PATH" AMENT_PREFIX_PATH="$prefix" LD_LIBRARY_PATH="$prefix/lib"
command -v cmake >/dev/null || "$prefix/bin/pip" install -q cmake >&2
{
    cmake -S "$work" -B "$work/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_INSTALL_PREFIX="$prefix" \
        -DPython3_EXECUTABLE="$prefix/bin/python" -DBUILD_TESTING=OFF \
        -DCMAKE_MODULE_PATH="$work" -DBUILD_SHARED_LIBS=ON -DCMAKE_C_FLAGS=-O0 -DCMAKE_CXX_FLAGS=-O0 &&
        cmake --build "$work/build" -j 2 && cmake --install "$work/build"
} >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
