-- When a block was last used, in seconds since 1970: for `ssd.retention` and for people. The order of eviction is `seq`.
ALTER TABLE block ADD COLUMN used INTEGER NOT NULL DEFAULT 0;
UPDATE block SET used = created;

-- 1: a host asked to keep it; it goes after all others.
ALTER TABLE block ADD COLUMN keep INTEGER NOT NULL DEFAULT 0;

-- Bytes of blobs written on each day (days since 1970, UTC), for `ssd.daily_writes` and for people.
CREATE TABLE written (
    day   INTEGER PRIMARY KEY,
    bytes INTEGER NOT NULL CHECK (bytes >= 0)
) STRICT;

-- Files that were to be removed and could not be: removed at the next open, and never taken in again.
CREATE TABLE gone (
    key        BLOB    NOT NULL CHECK (length(key) = 32),
    generation INTEGER NOT NULL CHECK (generation >= 0),
    PRIMARY KEY (key, generation)
) STRICT, WITHOUT ROWID;
