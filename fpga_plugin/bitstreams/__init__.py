"""Bitstreams: from a name to verified, trusted bytes, by one path.

Each module is a step of it:

    index              a file arrives, or is asked for: `reader` reads it in a bounded thread
    places, store      its path follows from its ids; `files` opens it, if nobody else may write it
    cache              it is copied and hashed in one pass; only the copy counts from here on
    trust              manifest, signatures and keys judge the digest; nothing is parsed before
    kinds              the copy is parsed (`gbs`, `aocx`), unpacked, and compared with its path

`library` takes these steps, remembers what came out (`verdicts`), and maps the copy. The other
modules make stores for people: `install`, `signing`, and `subcommands` of the command line.
"""
