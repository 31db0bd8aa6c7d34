// An allreduce of two processes over one TCP socket, with nothing around it: what a transport over TCP is measured by.
// Each sends the half that the other one reduces, adds what it receives, and sends its own half back; both directions
// move at the same time.
#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>

enum { CHUNK_NBYTES = 256 << 10 };

static float stage[CHUNK_NBYTES / sizeof(float)];

// Returns how many bytes were moved, or -1 if the connection broke.
static long moved(long result) {
  if (result > 0) return result;
  return result < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : -1;
}

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

// Sends `to_send` bytes and receives `to_receive` at once, adding floats to `in` if `add`, else to lie there. 0 if well.
static int exchange(int socket, const char* out, size_t to_send, char* in, size_t to_receive, int add) {
  size_t sent = 0, received = 0, summed = 0;
  while (sent < to_send || received < to_receive) {
    if (sent < to_send) {
      const long part = moved(send(socket, out + sent, least(CHUNK_NBYTES, to_send - sent), MSG_NOSIGNAL | MSG_DONTWAIT));
      if (part < 0) return -1;
      sent += (size_t)part;
    }
    if (received < to_receive) {
      const size_t ahead = received - summed;  // an element that has come in part
      char* place = add ? (char*)stage + ahead : in + received;
      const size_t room = least(CHUNK_NBYTES - (add ? ahead : 0), to_receive - received);
      const long part = moved(recv(socket, place, room, MSG_DONTWAIT));
      if (part < 0) return -1;
      received += (size_t)part;
      if (add && part > 0) {
        const size_t elements = (received - summed) / sizeof(float);
        float* sums = (float*)(in + summed);
        for (size_t i = 0; i < elements; ++i) sums[i] += stage[i];
        summed += elements * sizeof(float);
        for (size_t i = 0; i < received - summed; ++i) ((char*)stage)[i] = ((char*)(stage + elements))[i];
      }
    }
  }
  return 0;
}

// Sums `count` floats of both processes in place; `rank` is 0 in one and 1 in the other. 0 if all went well.
int bare_allreduce(int socket, int rank, float* data, size_t count) {
  const size_t first = count - count / 2;
  char* halves[2] = {(char*)data, (char*)(data + first)};
  const size_t nbytes[2] = {first * sizeof(float), (count - first) * sizeof(float)};
  const int mine = rank, other = 1 - rank;
  if (exchange(socket, halves[other], nbytes[other], halves[mine], nbytes[mine], 1) != 0) return -1;
  return exchange(socket, halves[mine], nbytes[mine], halves[other], nbytes[other], 0);
}

int bare_barrier(int socket) {
  char out = 0, in = 0;
  return exchange(socket, &out, 1, &in, 1, 0);
}
