#include "core/debug_socket.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "core/json.h"
#include "core/pending.h"
#include "core/process.h"
#include "core/progress.h"

namespace cudafuture {
namespace {

constexpr std::size_t kMostFutures = 1000;  // more are shown in groups
constexpr int kMostWaiting = 64;            // clients
constexpr time_t kPatience = 2;             // seconds for a client to ask, and to read

// Makes a folder for this user alone, unless it exists. False: another user could replace its files.
bool make_private(const std::string& folder) noexcept {
  struct stat found;
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return false;
  if (lstat(folder.c_str(), &found) != 0 || !S_ISDIR(found.st_mode)) return false;
  return found.st_uid == geteuid() && (found.st_mode & 022) == 0;
}

// Removes the sockets of dead processes, and what they have left of their progress, after an hour.
void remove_old(const std::string& folder) noexcept {
  DIR* const entries = opendir(folder.c_str());
  if (entries == nullptr) return;
  while (const dirent* entry = readdir(entries)) {
    char* rest = nullptr;
    const long process = std::strtol(entry->d_name, &rest, 10);
    if (process <= 0 || (std::strcmp(rest, ".socket") != 0 && std::strcmp(rest, ".progress") != 0)) continue;
    struct stat found;
    const bool is_old = std::strcmp(rest, ".socket") == 0 ||
                        (fstatat(dirfd(entries), entry->d_name, &found, AT_SYMLINK_NOFOLLOW) == 0 &&
                         found.st_mtime + 3600 < time(nullptr));
    if (is_old && kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH)
      unlinkat(dirfd(entries), entry->d_name, 0);
  }
  closedir(entries);
}

// Fills in an address whose path may be longer than an address holds: it leads through the folder's descriptor.
sockaddr_un address_in(int folder, const std::string& name) noexcept {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", folder, name.c_str());
  return address;
}

bool may_ask(int client) noexcept {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(client, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return false;
  return peer.uid == geteuid() || peer.uid == 0;
}

void send_all(int client, const std::string& text) noexcept {
  std::size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t count = send(client, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return;
    sent += static_cast<std::size_t>(count);
  }
}

}  // namespace

DebugSocket& DebugSocket::get() noexcept {
  static auto* socket = new DebugSocket;  // leaked: operations may begin until the end of the process
  return *socket;
}

void DebugSocket::configure(std::string folder, std::string version) {
  std::lock_guard lock(mutex_);
  folder_ = std::move(folder);
  version_ = std::move(version);
}

std::string DebugSocket::path(const char* suffix) const { return folder_ + "/" + std::to_string(getpid()) + suffix; }

void DebugSocket::start() noexcept {
  if (is_forked_child()) return;
  std::lock_guard lock(mutex_);
  if (is_required.load(std::memory_order_relaxed)) return;
  start_locked();
  is_required.store(true, std::memory_order_release);
}

// Without a folder, a socket or a thread the program runs on: it can be asked in its own process only.
void DebugSocket::start_locked() noexcept {
  mark_used();
  if (folder_.empty() || is_shut_down() || !make_private(folder_)) return;
  unlink(path(".progress").c_str());                                  // of a dead process with this number
  if (parent_ == 0) ProgressFile::get().set_path(path(".progress"));  // a child has no progress of its own
  if (!listen()) return;
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread takes no signals
  try {
    thread_ = std::thread([this] { loop(); });
  } catch (const std::system_error&) {
    close(std::exchange(listening_, -1));
    close(std::exchange(stopping_, -1));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

bool DebugSocket::listen() noexcept {
  const int folder = open(folder_.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  const std::string name = std::to_string(getpid()) + ".socket";
  unlinkat(folder, name.c_str(), 0);  // of a dead process with this number
  const sockaddr_un address = address_in(folder, name);
  listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  stopping_ = eventfd(0, EFD_CLOEXEC);
  const bool is_ready = listening_ >= 0 && stopping_ >= 0 &&
                        bind(listening_, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                        fchmodat(folder, name.c_str(), 0600, 0) == 0 && ::listen(listening_, kMostWaiting) == 0;
  close(folder);
  if (is_ready) return true;
  if (listening_ >= 0) close(std::exchange(listening_, -1));
  if (stopping_ >= 0) close(std::exchange(stopping_, -1));
  return false;
}

void DebugSocket::loop() noexcept {
  pthread_setname_np(pthread_self(), "cudafuture-ps");
  remove_old(folder_);
  for (;;) {
    pollfd waiting[] = {{listening_, POLLIN, 0}, {stopping_, POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents != 0) return;
    if ((waiting[0].revents & ~POLLIN) != 0) return;  // the program has closed our descriptor
    if ((waiting[0].revents & POLLIN) == 0) continue;
    const int client = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
    if (client < 0) {  // no descriptor is left: try again later
      poll(&waiting[1], 1, 100);
      continue;
    }
    set_client(client);
    serve(client);
    set_client(-1);
    close(client);
  }
}

void DebugSocket::set_client(int client) noexcept {
  std::lock_guard lock(mutex_);
  client_ = client;
}

void DebugSocket::serve(int client) const noexcept {
  const timeval patience{kPatience, 0};
  setsockopt(client, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  setsockopt(client, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
  if (!may_ask(client)) return;
  char asked[64];
  if (recv(client, asked, sizeof asked, 0) <= 0)
    return;  // a client that asks sends one line, whose words are later ones'
  try {
    send_all(client, reply());
  } catch (const std::exception&) {  // no memory
  }
}

std::string DebugSocket::reply() const {
  JsonWriter json;
  json.begin_object();
  json.key("protocol").value(std::int64_t{1});
  json.key("version").value(version_);
  json.key("process").value(static_cast<std::int64_t>(getpid()));
  json.key("forked_from").value(static_cast<std::int64_t>(parent_));
  json.key("rank").value(static_cast<std::int64_t>(ProgressFile::get().rank()));
  json.key("world_size").value(static_cast<std::int64_t>(ProgressFile::get().size()));
  json.key("worker").value(ProgressFile::get().worker());
  json.end_object();
  std::string text = json.take();
  text.back() = ',';
  return text + "\"pending\":" + as_json(PendingGraph::walk({}, PendingGraph::From::threads), kMostFutures) + "}";
}

void DebugSocket::start_in_child() noexcept {
  new (&mutex_) std::mutex;  // it may have been held by a thread that does not exist here
  if (!is_required.load(std::memory_order_relaxed) || !thread_.joinable()) return;
  ProgressFile::get().leave_to_parent();
  new (&thread_) std::thread;
  close(std::exchange(listening_, -1));
  close(std::exchange(stopping_, -1));
  if (client_ >= 0) close(std::exchange(client_, -1));
  parent_ = static_cast<int>(getppid());
  std::lock_guard lock(mutex_);
  start_locked();
}

void DebugSocket::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    is_required.store(true, std::memory_order_relaxed);  // it does not start any more
    if (!thread_.joinable()) return;
    eventfd_write(stopping_, 1);
    if (client_ >= 0) shutdown(client_, SHUT_RDWR);  // it may be slow
  }
  thread_.join();
  close(std::exchange(listening_, -1));
  close(std::exchange(stopping_, -1));
  unlink(path(".socket").c_str());
  unlink(path(".progress").c_str());
}

}  // namespace cudafuture
