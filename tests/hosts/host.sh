#!/bin/sh
# Becomes process 1 of an emulated host, in namespaces that emulation.py made: its own /run, /tmp, /dev/shm, HOME, users,
# and names; then sshd. FOLDER holds key, key.pub, and hosts; the host sees each SHARED path, also where it is in /tmp.
#   host.sh FOLDER NAME ADDRESS MAC [SHARED...]
set -eu
folder=$1 name=$2 address=$3 mac=$4
shift 4

mount -t tmpfs none /run
mkdir -p -m 700 /run/home/.ssh /run/sshd /run/tmp
cp "$folder/hosts" "$folder/key" "$folder/key.pub" /run
cp "$folder/key" /run/home/.ssh/id_ed25519
printf '%s\n' 'StrictHostKeyChecking no' 'UserKnownHostsFile /dev/null' 'LogLevel ERROR' 'ConnectTimeout 10' \
  >/run/home/.ssh/config
chmod 600 /run/key /run/home/.ssh/*

mount -t tmpfs -o mode=1777 none /run/tmp
for path in "$@"; do
  mkdir -p "/run/tmp/${path#/tmp/}"
  mount --bind "$path" "/run/tmp/${path#/tmp/}"
done
mount --move /run/tmp /tmp
mount -t tmpfs -o mode=1777,size=256m none /dev/shm # which tests may fill

hostname "$name"
sed 's,^root:\([^:]*:[^:]*:[^:]*:[^:]*\):[^:]*:,root:\1:/run/home:,' /etc/passwd >/run/passwd
(umask 077 && sed 's,^root:[^:]*:,root:*:,' /etc/shadow >/run/shadow) # sshd takes no locked account
for file in hosts passwd shadow; do mount --bind "/run/$file" "/etc/$file"; done

ip link set dev lo up
until ip link show dev eth0 >/dev/null 2>&1; do sleep 0.02; done
ip link set dev eth0 address "$mac"
ip address add "$address/24" dev eth0
ip link set dev eth0 up

cd /run/home
exec env -i PATH="$PATH" HOME=/run/home "$(command -v sshd)" -D -e -f /dev/null -h /run/key -o PidFile=none -o UsePAM=no \
  -o PermitRootLogin=yes -o StrictModes=no -o AuthorizedKeysFile=/run/key.pub -o MaxStartups=100
