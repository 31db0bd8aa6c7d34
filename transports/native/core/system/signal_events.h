//! SIGUSR1 as an event: it makes descriptors readable, also while the program is in a call that never ends.
#pragma once

namespace unisono {

//! From now on SIGUSR1 adds 1 to the eventfd `event`. It does not if the process handles or ignores SIGUSR1 already, or
//! if it does so later. At most 16 events are notified; more are ignored.
void notify_of_signal(int event);
//! Undoes `notify_of_signal`. After the last event, SIGUSR1 ends the process again, unless the program handles it.
void forget_signal(int event);

}  // namespace unisono
