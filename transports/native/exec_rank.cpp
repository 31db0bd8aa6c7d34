// Becomes a rank: ties this process to its launcher, binds it to cores, and executes the rank's command.
//
// Run as `exec_rank LAUNCHER_PID CORES COMMAND…`. CORES are numbers with commas between them, such as "0,1", or empty
// for no binding. It is a program of its own, because the launcher may have threads and so must not do this between
// fork and exec. All settings survive execve. It is not a Python program, because starting an interpreter would take
// longer than everything else that a launcher does.
//
// A rank inherits the launcher's treatment of signals. Two inherited settings would break it, so they are undone here.
// A rank that ignores SIGCHLD cannot learn the exit codes of its children. A rank that blocks SIGTERM, as the threads
// of some programs do, cannot be stopped. Other signals stay ignored: a job under nohup must survive SIGHUP.
#include <fcntl.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

void reset_signals() {
  std::signal(SIGCHLD, SIG_DFL);
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

// Moves this process into a process group of its own, without a controlling terminal. It stays in the session of the
// launcher, because Linux may share the cores among sessions (sched_autogroup_enabled). Then a rank that yields its
// core would not yield it to a rank of another session.
void leave_terminal() {
  ::setpgid(0, 0);
  const int terminal = ::open("/dev/tty", O_RDWR | O_NOCTTY | O_CLOEXEC);
  if (terminal < 0) return;  // there is none
  ::ioctl(terminal, TIOCNOTTY);
  ::close(terminal);
}

// Binds this process to a list of cores. Returns whether the system allows it; an empty list binds to nothing.
bool bind(const char* list) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (*list == '\0') return true;
  for (char* end = nullptr; *list != '\0'; list = *end == ',' ? end + 1 : end) {
    const unsigned long core = std::strtoul(list, &end, 10);
    if (end == list || core >= CPU_SETSIZE) {
      errno = EINVAL;
      return false;
    }
    CPU_SET(core, &cores);
  }
  return ::sched_setaffinity(0, sizeof cores, &cores) == 0;
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 4) return 2;
  reset_signals();
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  leave_terminal();
  if (::getppid() != std::atoi(arguments[1])) return 1;  // it died before prctl took effect, so no signal will come
  if (!bind(arguments[2])) {
    std::fprintf(stderr, "unisono: cannot bind to cores %s: %s\n", arguments[2], std::strerror(errno));
    return 1;
  }
  ::execvp(arguments[3], arguments + 3);
  const int why = errno;
  std::fprintf(stderr, "unisono: cannot start '%s': %s\n", arguments[3], std::strerror(why));
  return why == ENOENT ? 127 : 126;
}
