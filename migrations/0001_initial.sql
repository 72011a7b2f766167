-- One row per block on the SSD. A row promises a file, never the reverse: files are written before their row
-- and removed after it.
CREATE TABLE block (
    key        BLOB    PRIMARY KEY CHECK (length(key) = 32),        -- chain key
    namespace  BLOB    NOT NULL CHECK (length(namespace) = 32),
    parent     BLOB    NOT NULL CHECK (length(parent) = 32),        -- the namespace itself for a first block
    generation INTEGER NOT NULL CHECK (generation >= 0),            -- with the key, the file's name
    start      INTEGER NOT NULL CHECK (start >= 0),                 -- tokens before the block
    tokens     INTEGER NOT NULL CHECK (tokens > 0),                 -- tokens in the block
    file_bytes INTEGER NOT NULL CHECK (file_bytes > 0),
    raw_bytes  INTEGER NOT NULL CHECK (raw_bytes > 0),              -- bytes of state in RAM
    seq        INTEGER NOT NULL,                                    -- recency: higher is more recent; no clock
    hits       INTEGER NOT NULL DEFAULT 0 CHECK (hits >= 0),
    created    INTEGER NOT NULL                                     -- seconds since 1970, for people only
) STRICT, WITHOUT ROWID;

-- Kept apart, so that writing recency does not rewrite two kilobytes of token ids a row.
CREATE TABLE block_tokens (
    key BLOB PRIMARY KEY CHECK (length(key) = 32),
    ids BLOB NOT NULL CHECK (length(ids) > 0 AND length(ids) % 8 = 0)   -- int64, little-endian
) STRICT, WITHOUT ROWID;

CREATE TABLE namespace (
    digest BLOB PRIMARY KEY CHECK (length(digest) = 32),
    model  TEXT NOT NULL                                            -- a label for people
) STRICT, WITHOUT ROWID;

-- What the layers of a namespace's states are, for those that are not the model's own: a host that quantizes, say.
CREATE TABLE layers (
    namespace BLOB PRIMARY KEY CHECK (length(namespace) = 32),
    origin    TEXT NOT NULL,                                        -- the model's fingerprint
    classes   TEXT NOT NULL                                         -- JSON
) STRICT, WITHOUT ROWID;

-- Sums over all runs, for `tiered-cache stats`.
CREATE TABLE counter (
    name  TEXT PRIMARY KEY,
    value INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
