#!/bin/sh
# Makes the store in $STORE what the artifact $REFERENCE holds, or changes nothing. Needs oras, and a shell with the
# usual tools (busybox is enough). Who reads the store sees all of the old files or all of the new ones: the files are in
# a directory of their own, and one link is renamed, as kubelet does for a ConfigMap. Each run ends what another began.
set -eu
cd "$STORE"
umask 022

for path in *; do
  if [ -e "$path" ] && [ ! -L "$path" ]; then
    echo "$STORE/$path is not of this script: empty the directory, or name another" >&2
    exit 1
  fi
done

manifest=$(oras manifest fetch "$REFERENCE")
name=..$(printf '%s' "$manifest" | sha256sum | cut -c1-16)
if [ "$(readlink ..data || true)" != "$name" ]; then
  # Room first: a full disk would also take the room of the plugin's journal, if they share it.
  bytes=$(printf '%s' "$manifest" | grep -o '"size": *[0-9]*' | awk -F: '{sum += $2} END {printf "%.0f", sum}')
  free=$(df -Pk . | awk 'NR == 2 {printf "%.0f", $4 * 1024}')
  if [ "$((bytes + 67108864))" -gt "$free" ]; then
    echo "$REFERENCE has $bytes bytes, and $STORE has room for $free: 64 MiB have to stay free" >&2
    exit 1
  fi
  rm -rf "$name"
  oras pull --output "$name" "$REFERENCE"
  chmod -R u=rwX,go=rX "$name"
  ln -sfn "$name" ..data.new
  mv -f -T ..data.new ..data
  echo "$REFERENCE is in place now"
fi

for path in ..data/*; do
  [ -L "${path#..data/}" ] || ln -s "$path" "${path#..data/}"
done
for link in *; do
  if [ -L "$link" ] && [ ! -e "$link" ]; then rm "$link"; fi
done
for directory in ..[0-9a-f]*; do
  [ "$directory" = "$name" ] || [ -L "$directory" ] || rm -rf "$directory"
done
