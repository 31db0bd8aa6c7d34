"""Stands below all layers: small modules that need nothing but `unisono.errors` and the standard library.

`records`       frozen classes that are quick to make
`deadlines`     time limits
`json_checks`   checks of files and JSON that another process has written
`wire`          messages over sockets, with a length, a limit and a deadline
`printable`     text of others, made harmless for terminals
`near_names`    the nearest name to one that does not exist
`html_page`     the frame of the HTML pages that commands write
`log`           messages for users
`installing`    the command that adds an optional part
`entry_points`  entry points of installed packages
`uncopyable`    classes whose objects cannot be copied
`autograph`     classes that AutoGraph of TensorFlow must not rewrite
`once`          values that a process makes once
`forks`         files that a forked child must close
`processes`     processes that Unisono starts
`streams`       the standard streams
`program`       the first call of every program
`interrupts`    Ctrl-C while a command imports its modules
`watchdog`      a function that is called if a block takes too long
"""
