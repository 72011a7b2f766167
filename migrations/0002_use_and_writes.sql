-- When a block was last used, in seconds since 1970: for `ssd.retention` and for people. The order of eviction is `seq`.
ALTER TABLE block ADD COLUMN used INTEGER NOT NULL DEFAULT 0;
UPDATE block SET used = created;

-- Bytes of blobs written on each day (days since 1970, UTC), for `ssd.daily_writes` and for people.
CREATE TABLE written (
    day   INTEGER PRIMARY KEY,
    bytes INTEGER NOT NULL CHECK (bytes >= 0)
) STRICT;
