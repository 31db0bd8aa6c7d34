//! Ctrl-C for threads that wait while the main thread is outside of Python, and so cannot run Python's signal handler.
#pragma once

namespace unisono {

//! Counts SIGINT from now on, and passes it on to the handler of the program. Does nothing if SIGINT ends the process
//! or is ignored. It may be called again, because the program may have set another handler since.
void watch_keyboard();

//! Whether Ctrl-C was pressed, Python has not handled it yet, and Python's handler will raise KeyboardInterrupt. The
//! caller must not hold the interpreter's lock.
bool keyboard_interrupted();

}  // namespace unisono
