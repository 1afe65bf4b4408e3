"""The storage tier's backends: blobs of KV pages under keys, on disks and in the stores of other projects."""
