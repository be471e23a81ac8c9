#!/usr/bin/env bash
# Make a folder of Debian packages an apt repository, signed with a key of gpg. Any web server can serve it.
#
#     systemd/build_deb.sh SITE/python3.11                 build packages into the repository; 3.11: Python of the boxes
#     systemd/publish_apt.sh --key KEY SITE/python3.11     list and sign all packages of the folder
#
# KEY is a fingerprint, an address or a name. Writes Packages, InRelease and the public key edge-server.gpg. A box that asks
# meanwhile gets the old list or the new one: InRelease comes last, by a rename, and names the lists by their digest. Old
# packages can be deleted before a call; boxes that have them keep them. Needs apt-ftparchive (package apt-utils) and gpg.
set -euo pipefail
umask 022

if [ $# -ne 3 ] || [ "$1" != --key ] || [ ! -d "$3" ]; then
  sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
  exit 64
fi
key=$2
cd "$3"
# One kind of digest: boxes ask for the lists by the strongest that is named.
only_sha256=(-o APT::FTPArchive::MD5=false -o APT::FTPArchive::SHA1=false -o APT::FTPArchive::SHA512=false)
# The second instance would list packages that the first one has not written yet.
exec 9>.lock
flock 9

apt-ftparchive "${only_sha256[@]}" packages . >.Packages
digest=$(sha256sum .Packages | cut -d ' ' -f 1)
mkdir -p by-hash/SHA256
cp .Packages "by-hash/SHA256/$digest"
mv .Packages Packages
# Lists of a week: a box that has read an older InRelease still finds its own.
find by-hash -type f -mtime +7 ! -name "$digest" -delete
apt-ftparchive "${only_sha256[@]}" \
  -o APT::FTPArchive::Release::Origin=edge_server -o APT::FTPArchive::Release::Label=edge_server \
  -o APT::FTPArchive::Release::Acquire-By-Hash=yes -o APT::FTPArchive::Release::Patterns::=Packages release . >.Release
gpg --batch --yes --local-user "$key" --digest-algo SHA512 --clearsign --output .InRelease .Release
gpg --batch --yes --export --output edge-server.gpg "$key"
sync .InRelease Packages ./*.deb
mv .InRelease InRelease
rm .Release
