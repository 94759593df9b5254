"""Where parameters live: tables of rows, served by DGL's kvstore and read through shared memory."""
