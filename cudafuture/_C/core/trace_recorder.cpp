#include "core/trace_recorder.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/device_times.h"
#include "core/error.h"
#include "core/foreign.h"
#include "core/future.h"
#include "core/json.h"
#include "core/process.h"
#include "core/progress.h"
#include "core/thread_activity.h"

namespace cudafuture {

constexpr std::size_t kTextSize = 80;

// An event in a ring; in the file, its text is as long as it says. `reached`: `time` is that of the recording of the
// device's event on the host, or the virtual time at which it is reached, and `text` the type of the device.
struct TraceRecord {
  std::int64_t time;   // nanoseconds of CLOCK_MONOTONIC, or of virtual time
  std::int64_t order;  // nanoseconds of CLOCK_MONOTONIC
  std::uint64_t future;
  std::uint64_t other;  // issued: the place; follows: the parent; reached: the stream
  std::int64_t number;  // reached: nanoseconds of the device since the first event on it
  std::int64_t bytes;   // reached: `order` of the future's event `done`, since addresses are used again
  std::int32_t peer;    // reached: the index of the device
  TraceEvent event;
  std::uint8_t state;  // done: the state and, in the upper half, the maker
  std::uint8_t is_virtual;
  std::uint8_t length;  // of the text
  char text[kTextSize];
};
static_assert(offsetof(TraceRecord, text) == 56);

namespace {

constexpr std::uint64_t kRingSize = 8192;  // events; a power of two
constexpr std::chrono::milliseconds kPause{100};
constexpr std::chrono::milliseconds kDevicePause{1};  // while an event is expected: bounds the error of its clock
constexpr std::size_t kMostBuffered = 1 << 20;        // bytes, before they are written

enum class TraceChunk : std::uint32_t { header, thread, place, events, lost, trailer };

void put_time(TraceRecord& record) noexcept {
  record.order = monotonic_nanoseconds();
  const HostTime time = host_time();
  record.is_virtual = time.generation != 0;
  record.time = record.is_virtual ? static_cast<std::int64_t>(time.seconds * 1e9 + 0.5) : record.order;
}

void put_head(TraceRecord& record, std::string_view text) noexcept {
  record.length = static_cast<std::uint8_t>(std::min(text.size(), kTextSize));
  std::memcpy(record.text, text.data(), record.length);
}

// The end of a long text: a path says more there. It begins with a name, where it has a separator.
void put_tail(TraceRecord& record, std::string_view text) noexcept {
  if (text.size() > kTextSize) {
    text.remove_prefix(text.size() - kTextSize);
    if (const std::size_t name = text.find('/'); name != std::string_view::npos) text.remove_prefix(name + 1);
  }
  put_head(record, text);
}

}  // namespace

// The events of one thread. The thread writes `head`, the recorder's thread `tail`.
struct TraceRing {
  std::atomic<std::uint64_t> head{0};
  std::atomic<std::uint64_t> lost{0};  // for want of room, since the ring was read last
  alignas(64) std::atomic<std::uint64_t> tail{0};
  std::atomic<bool> has_ended{false};  // its thread
  const std::uint32_t number;
  const pid_t thread = static_cast<pid_t>(syscall(SYS_gettid));
  bool is_named = false;  // in the file; the recorder's thread alone uses it
  TraceRecord records[kRingSize];

  explicit TraceRing(std::uint32_t number_of) noexcept : number(number_of) {}
};

struct TraceRecorder::State {
  std::mutex control;        // held by start() and stop()
  mutable std::mutex mutex;  // guards what follows; held while the file is written
  std::condition_variable wake;
  std::vector<TraceRing*> rings;
  std::unordered_set<std::uint64_t> places;
  std::string buffer;
  std::thread writer;
  std::uint64_t lost = 0;
  int fd = -1;
  bool is_stopping = false;
  std::atomic<bool> is_due{false};  // a ring is half full
  std::string failure;

  void begin_chunk(TraceChunk kind) {
    put(static_cast<std::uint32_t>(kind)), put(std::uint32_t{0}), chunk_ = buffer.size();
  }
  void end_chunk() {
    const auto size = static_cast<std::uint32_t>(buffer.size() - chunk_);
    std::memcpy(buffer.data() + chunk_ - sizeof size, &size, sizeof size);
  }
  template <class T>
  void put(const T& value) {
    buffer.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_chunk(TraceChunk kind, std::string_view text) {
    begin_chunk(kind);
    buffer += text;
    end_chunk();
  }

  DeviceTimes devices;

  void ask_devices();
  void name_thread(TraceRing& ring);
  void name_place(const OperationPlace& place);
  void read(TraceRing& ring);
  void read_all();
  bool write_buffer() noexcept;
  void run() noexcept;

 private:
  std::size_t chunk_ = 0;
};

namespace {

[[gnu::tls_model("initial-exec")]] thread_local constinit TraceRing* ring_of_thread = nullptr;
thread_local constinit bool has_ring_ended = false;

struct RingOwner {
  ~RingOwner() {
    has_ring_ended = true;
    ring_of_thread->has_ended.store(true, std::memory_order_release);  // the recorder's thread frees it
    ring_of_thread = nullptr;
  }
};

std::mutex& rings_mutex() noexcept {
  static auto* mutex = new std::mutex;
  return *mutex;
}
// Rings of threads that have recorded since the recorder's thread looked last.
std::vector<TraceRing*>& new_rings() noexcept {
  static auto* rings = new std::vector<TraceRing*>;
  return *rings;
}

[[gnu::cold, gnu::noinline]] TraceRing* make_ring() noexcept {
  static std::atomic<std::uint32_t> made{0};
  if (has_ring_ended) return nullptr;
  ring_of_thread = new (std::nothrow) TraceRing(made.fetch_add(1));
  if (ring_of_thread == nullptr) return nullptr;
  static thread_local RingOwner owner;
  std::lock_guard lock(rings_mutex());
  new_rings().push_back(ring_of_thread);
  return ring_of_thread;
}

bool is_forked_from_recorder = false;

// Returns the next record of the calling thread, which end_record() adds; null: there is no room.
TraceRecord* begin_record(TraceEvent event, const Future* future) noexcept {
  TraceRing* const ring = ring_of_thread != nullptr ? ring_of_thread : make_ring();
  if (ring == nullptr) return nullptr;
  const std::uint64_t head = ring->head.load(std::memory_order_relaxed);
  if (head - ring->tail.load(std::memory_order_acquire) == kRingSize) {
    ring->lost.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  TraceRecord& record = ring->records[head % kRingSize];
  put_time(record);
  record.future = reinterpret_cast<std::uintptr_t>(future);
  record.other = 0;
  record.number = record.bytes = kUnknown;
  record.peer = static_cast<std::int32_t>(kUnknown);
  record.event = event;
  record.state = record.length = 0;
  return &record;
}

void end_record() noexcept {
  const std::uint64_t head = ring_of_thread->head.load(std::memory_order_relaxed) + 1;
  ring_of_thread->head.store(head, std::memory_order_release);
  if (head % (kRingSize / 2) == 0) [[unlikely]]
    TraceRecorder::get().wake();
}

void record_reached(std::uint64_t future, std::int64_t done, const DeviceEvent& event, std::int64_t time,
                    double seconds) noexcept {
  TraceRecord* const record = begin_record(TraceEvent::reached, nullptr);
  if (record == nullptr) return;
  record->time = time;
  record->future = future;
  record->other = static_cast<std::uint64_t>(event.stream_id().value_or(0));
  record->number = static_cast<std::int64_t>(seconds * 1e9);
  record->bytes = done;
  record->peer = event.device().index();
  put_head(*record, c10::DeviceTypeName(event.device().type(), /*lower_case=*/true));
  end_record();
}

void record_event(TraceEvent event, const Future& future, const TraceDetail& detail) {
  TraceRecord* const record = begin_record(event, &future);
  if (record == nullptr) return;
  switch (event) {
    case TraceEvent::issued:
      if (const OperationFacts* const facts = future.operation()) {
        record->other = reinterpret_cast<std::uintptr_t>(facts->place);
        record->number = facts->number;
        record->bytes = facts->bytes;
        record->peer = static_cast<std::int32_t>(facts->peer);
      }
      put_head(*record, future.name());
      break;
    case TraceEvent::follows:
      record->other = reinterpret_cast<std::uintptr_t>(detail.parent);
      break;
    case TraceEvent::done:
      record->state =
          static_cast<std::uint8_t>(static_cast<unsigned>(future.state()) | static_cast<unsigned>(future.maker()) << 4);
      put_head(*record, future.name());
      break;
    case TraceEvent::wait_begin:
      if (detail.line != nullptr) put_tail(*record, text_of(*detail.line));
      break;
    case TraceEvent::callback_begin:
      if (detail.function != nullptr) put_tail(*record, foreign_runtime().describe(detail.function));
      break;
    default:
      break;
  }
  const std::int64_t order = record->order;
  end_record();
  if (event == TraceEvent::done && !future.events().empty()) TraceRecorder::get().follow_devices(future, order);
}

}  // namespace

void TraceRecorder::follow_devices(const Future& future, std::int64_t done) noexcept {
  const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(&future));
  for (const DeviceEventPtr& event : future.events().events()) {
    if (event->is_captured() || !event->stream_id()) continue;
    if (const std::optional<double> time = event->virtual_time()) {
      record_reached(address, done, *event, static_cast<std::int64_t>(*time * 1e9 + 0.5), 0);
    } else if (event->recorded_at() != 0) {
      const bool is_first = state_->devices.empty();
      if (!state_->devices.add(address, done, event) && ring_of_thread != nullptr) {
        ring_of_thread->lost.fetch_add(1, std::memory_order_relaxed);
      }
      if (is_first) wake();
    }
  }
}

TraceRecorder::TraceRecorder() noexcept : state_(std::make_unique<State>()) {
  pthread_atfork(nullptr, nullptr, [] {  // the file is the parent's
    trace_hook.store(nullptr);
    is_forked_from_recorder = true;
  });
}

TraceRecorder& TraceRecorder::get() noexcept {
  static auto* recorder = new TraceRecorder;  // leaked: threads record until the end of the process
  return *recorder;
}

bool TraceRecorder::is_recording() const noexcept { return trace_hook.load() == record_event; }

std::string TraceRecorder::start(const std::string& path, const std::string& header) {
  State& state = *state_;
  if (is_forked_from_recorder) throw Error(ErrorKind::invalid_state, "a forked child records no trace");
  if (is_recording()) throw Error(ErrorKind::invalid_state, "a trace is being recorded already");
  std::lock_guard held(state.control);
  if (is_recording()) throw Error(ErrorKind::invalid_state, "a trace is being recorded already");
  if (state.writer.joinable()) state.writer.join();  // its file could not be written
  std::lock_guard lock(state.mutex);
  std::string earlier_failure = std::exchange(state.failure, {});
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) throw std::system_error(errno, std::generic_category(), path);
  state.fd = fd;
  state.lost = 0;
  state.is_stopping = false;
  state.places.clear();
  state.devices.clear();
  state.buffer = "cftrace1";
  state.put_chunk(TraceChunk::header, header);
  if (!state.write_buffer()) return earlier_failure;  // stop() tells why
  {
    std::lock_guard added(rings_mutex());
    for (TraceRing* ring : std::exchange(new_rings(), {})) state.rings.push_back(ring);
  }
  for (TraceRing* ring : state.rings) {  // of an earlier recording
    ring->tail.store(ring->head.load(std::memory_order_acquire), std::memory_order_release);
    ring->lost.store(0);
    ring->is_named = false;
  }
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    state.writer = std::thread([&state] { state.run(); });
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    close(std::exchange(state.fd, -1));
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  trace_hook.store(record_event, std::memory_order_release);
  return earlier_failure;
}

TraceRecorder::End TraceRecorder::stop(const std::string& trailer) {
  State& state = *state_;
  if (is_forked_from_recorder) return {};
  TraceHook expected = record_event;
  trace_hook.compare_exchange_strong(expected, nullptr);
  std::lock_guard held(state.control);
  {
    std::lock_guard lock(state.mutex);
    state.is_stopping = true;
  }
  state.wake.notify_all();
  if (state.writer.joinable()) state.writer.join();
  std::lock_guard lock(state.mutex);
  if (state.fd >= 0) {
    state.ask_devices();
    state.read_all();
    state.put_chunk(TraceChunk::trailer, trailer);
  }
  if (state.fd >= 0 && state.write_buffer()) close(std::exchange(state.fd, -1));
  state.devices.clear();
  return {std::exchange(state.lost, 0), std::exchange(state.failure, {})};
}

void TraceRecorder::State::name_thread(TraceRing& ring) {
  begin_chunk(TraceChunk::thread);
  put(ring.number);
  put(static_cast<std::int32_t>(ring.thread));
  char name[32] = {};
  const std::string path = "/proc/self/task/" + std::to_string(ring.thread) + "/comm";
  if (const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC); file >= 0) {
    const ssize_t length = ::read(file, name, sizeof name - 1);
    if (length > 0) name[length - 1] = '\0';  // for the end of the line
    close(file);
  }
  buffer += ring.thread == getpid() ? "main" : name;
  end_chunk();
  ring.is_named = true;
}

void TraceRecorder::State::name_place(const OperationPlace& place) {
  begin_chunk(TraceChunk::place);
  put(static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(&place)));
  JsonWriter json;
  json.begin_object();
  json.key("kind").value(place.kind);
  json.key("name").value(place.name);
  if (place.progress != nullptr) json.key("group").value(place.progress->id());
  json.end_object();
  buffer += json.take();
  end_chunk();
}

// Moves the events of one thread into the buffer.
void TraceRecorder::State::read(TraceRing& ring) {
  const std::uint64_t head = ring.head.load(std::memory_order_acquire);
  std::uint64_t tail = ring.tail.load(std::memory_order_relaxed);
  if (const std::uint64_t count = ring.lost.exchange(0)) {
    lost += count;
    begin_chunk(TraceChunk::lost);
    put(ring.number);
    put(count);
    end_chunk();
  }
  if (head == tail) return;
  if (!ring.is_named) name_thread(ring);
  for (std::uint64_t i = tail; i != head; ++i) {
    const TraceRecord& record = ring.records[i % kRingSize];
    if (record.event == TraceEvent::issued && record.other != 0 && places.insert(record.other).second)
      name_place(*reinterpret_cast<const OperationPlace*>(record.other));
  }
  begin_chunk(TraceChunk::events);
  put(ring.number);
  for (; tail != head; ++tail) {
    const TraceRecord& record = ring.records[tail % kRingSize];
    buffer.append(reinterpret_cast<const char*>(&record), offsetof(TraceRecord, text) + record.length);
  }
  end_chunk();
  ring.tail.store(head, std::memory_order_release);
}

// Adds the events that devices have reached to the ring of the calling thread, and reads that when it is half full.
void TraceRecorder::State::ask_devices() {
  constexpr std::size_t kMost = kRingSize / 2;
  const auto record = [](const DeviceTimes::Expected& reached, double seconds) {
    record_reached(reached.future, reached.done, *reached.event, reached.event->recorded_at(), seconds);
  };
  while (devices.ask(kMost, record) == kMost && fd >= 0) read_all();
}

void TraceRecorder::State::read_all() {
  {
    std::lock_guard held(rings_mutex());
    for (TraceRing* ring : std::exchange(new_rings(), {})) rings.push_back(ring);
  }
  for (TraceRing*& ring : rings) {
    const bool has_ended = ring->has_ended.load(std::memory_order_acquire);  // before its last events are read
    read(*ring);
    if (buffer.size() >= kMostBuffered && !write_buffer()) return;
    if (has_ended) delete std::exchange(ring, nullptr);
  }
  std::erase(rings, nullptr);
}

// Writes the buffer. False: the file cannot be written, and the recording has ended.
bool TraceRecorder::State::write_buffer() noexcept {
  std::size_t done = 0;
  while (done < buffer.size()) {
    const ssize_t written = ::write(fd, buffer.data() + done, buffer.size() - done);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : ENOSPC;
      TraceHook expected = record_event;
      trace_hook.compare_exchange_strong(expected, nullptr);
      close(std::exchange(fd, -1));
      buffer.clear();
      failure = std::strerror(error);
      return false;
    }
    done += static_cast<std::size_t>(written);
  }
  buffer.clear();
  return true;
}

void TraceRecorder::State::run() noexcept {
  pthread_setname_np(pthread_self(), "cudafuture-rec");
  std::unique_lock lock(mutex);
  auto due = std::chrono::steady_clock::now() + kPause;
  while (!is_stopping && fd >= 0) {
    const auto until = devices.empty() ? due : std::min(due, std::chrono::steady_clock::now() + kDevicePause);
    const bool is_called = wake.wait_until(lock, until, [this] { return is_stopping || is_due.exchange(false); });
    try {
      ask_devices();
      if (!is_called && std::chrono::steady_clock::now() < due) continue;
      due = std::chrono::steady_clock::now() + kPause;
      read_all();
    } catch (const std::bad_alloc&) {  // the rings keep what they have
      buffer.clear();
    }
    if (!write_buffer()) return;
  }
}

void TraceRecorder::wake() noexcept {
  state_->is_due.store(true);
  state_->wake.notify_one();
}

void TraceRecorder::span(TraceEvent event, std::string_view name) noexcept {
  if (trace_hook.load(std::memory_order_acquire) != record_event) return;
  TraceRecord* const record = begin_record(event, nullptr);
  if (record == nullptr) return;
  put_head(*record, name);
  end_record();
}

}  // namespace cudafuture
