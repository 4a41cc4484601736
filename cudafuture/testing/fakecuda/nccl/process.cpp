#include "fakecuda/nccl/process.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace fakenccl {
namespace {

struct Watch {
  int descriptor = -1;
  std::function<void()> died;
};

// One thread of the process sleeps until a peer rings or dies.
struct Doorbell {
  std::mutex mutex;
  int socket = -1;
  std::function<void()> woken;
  uint64_t next = 1;
  std::map<uint64_t, Watch> watches;
};

Doorbell& doorbell() {
  static auto* const object = new Doorbell;
  return *object;
}

// The address of a process's socket lies in the abstract namespace: it ends with the process and leaves no file.
socklen_t address_of(pid_t pid, uint64_t started, sockaddr_un* address) {
  memset(address, 0, sizeof *address);
  address->sun_family = AF_UNIX;
  const int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "fakenccl/%d/%llu", pid,
                              static_cast<unsigned long long>(started));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// Call the functions of the watches whose process has ended, and forget them.
void report_deaths(const std::vector<pollfd>& polled) {
  std::vector<std::function<void()>> calls;
  {
    const std::lock_guard lock(doorbell().mutex);
    for (const pollfd& p : polled) {
      if (p.revents == 0 || p.fd == doorbell().socket) continue;
      // The descriptor may have been closed meanwhile and its number given to another process, so it is asked again.
      pollfd again{p.fd, POLLIN, 0};
      if (poll(&again, 1, 0) <= 0) continue;
      for (auto it = doorbell().watches.begin(); it != doorbell().watches.end(); ++it) {
        if (it->second.descriptor != p.fd) continue;
        calls.push_back(std::move(it->second.died));
        close(p.fd);
        doorbell().watches.erase(it);
        break;
      }
    }
  }
  for (const auto& call : calls) call();
}

void serve_doorbell() {
  for (;;) {
    std::vector<pollfd> polled;
    {
      const std::lock_guard lock(doorbell().mutex);
      polled.push_back({doorbell().socket, POLLIN, 0});
      for (const auto& [token, watch] : doorbell().watches) polled.push_back({watch.descriptor, POLLIN, 0});
    }
    if (poll(polled.data(), polled.size(), -1) < 0) continue;
    char bytes[16];
    while (recv(doorbell().socket, bytes, sizeof bytes, MSG_DONTWAIT) >= 0) {
    }
    report_deaths(polled);
    doorbell().woken();
  }
}

}  // namespace

// Field 22 of /proc/PID/stat, counted after the name, which may contain blanks and brackets. A zombie has ended.
uint64_t start_time(pid_t pid) {
  FILE* file = fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "re");
  if (file == nullptr) return 0;
  char text[1024];
  const size_t length = fread(text, 1, sizeof text - 1, file);
  fclose(file);
  text[length] = 0;
  const char* field = strrchr(text, ')');
  if (field == nullptr || field[1] == 0 || field[2] == 'Z' || field[2] == 'X') return 0;
  unsigned long long started = 0;
  for (int number = 2; number < 22 && field != nullptr; ++number) field = strchr(field + 1, ' ');
  if (field != nullptr) sscanf(field, " %llu", &started);
  return started;
}

bool is_alive(pid_t pid, uint64_t started) { return start_time(pid) == started; }

uint64_t watch(pid_t pid, uint64_t started, std::function<void()> died) {
  // A descriptor of the process is opened before its start time is compared: after that a reused pid can do no harm.
  const int descriptor = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (descriptor < 0 || !is_alive(pid, started)) {
    if (descriptor >= 0) close(descriptor);
    died();
    return 0;
  }
  uint64_t token;
  {
    const std::lock_guard lock(doorbell().mutex);
    token = doorbell().next++;
    doorbell().watches[token] = Watch{descriptor, std::move(died)};
  }
  ring(getpid(), start_time(getpid()));  // the thread polls the new descriptor too
  return token;
}

void unwatch(uint64_t token) {
  const std::lock_guard lock(doorbell().mutex);
  const auto it = doorbell().watches.find(token);
  if (it == doorbell().watches.end()) return;
  close(it->second.descriptor);
  doorbell().watches.erase(it);
}

void ring(pid_t pid, uint64_t started) {
  sockaddr_un address;
  const socklen_t length = address_of(pid, started, &address);
  // A full queue means that the other process is about to wake, and no socket means that it has ended.
  sendto(doorbell().socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address), length);
}

void start_doorbell(std::function<void()> woken) {
  static std::once_flag once;
  std::call_once(once, [&] {
    Doorbell& bell = doorbell();
    bell.woken = std::move(woken);
    bell.socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un address;
    const socklen_t length = address_of(getpid(), start_time(getpid()), &address);
    if (bind(bell.socket, reinterpret_cast<sockaddr*>(&address), length) != 0)
      fprintf(stderr, "fakenccl [%d]: no doorbell: %s. Peers are polled each millisecond.\n", getpid(),
              strerror(errno));
    std::thread(serve_doorbell).detach();
  });
}

}  // namespace fakenccl
