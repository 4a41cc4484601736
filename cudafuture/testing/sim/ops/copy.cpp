#include "sim/ops/copy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <utility>

#include "sim/device/current.h"
#include "sim/device/here.h"
#include "sim/ops/access_list.h"
#include "sim/ops/alias.h"
#include "sim/ops/fallback.h"
#include "sim/ops/host_tensor.h"
#include "sim/ops/host_watch.h"
#include "sim/ops/tensors.h"

namespace sim {
namespace {

// Does it move bytes as they lie, and convert nothing?
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg();
}

// Does the stream read pinned memory where it is? Elements that do not lie one after another the host gathers first,
// and while it waits it is the host that converts.
bool read_in_stream(const at::Tensor& target, const at::Tensor& pinned, bool non_blocking) {
  if (same_bytes(target, pinned)) return true;
  return pinned.is_contiguous() && (non_blocking || target.scalar_type() == pinned.scalar_type());
}

// Does the stream write pinned memory where it is? What is to be scattered the host has to wait for.
bool written_in_stream(const at::Tensor& pinned, const at::Tensor& source) {
  return pinned.is_contiguous() || same_bytes(pinned, source);
}

std::function<void()> copying(at::Tensor target, at::Tensor source) {
  return [target = std::move(target), source = std::move(source)] { target.copy_(source); };
}

void copy_within(const at::Tensor& target, const at::Tensor& source) {
  Aliases aliases;
  AccessList accesses;
  accesses.read(source);
  accesses.write(target);
  enqueue(target.device().index(), "aten::copy_", copying(aliases.of(target), aliases.of(source)), std::move(accesses));
}

// Runs in the current stream of the source's device, between what the target's has done and what it will do.
void copy_between(const at::Tensor& target, const at::Tensor& source) {
  Accelerator& accelerator = Accelerator::get();
  const StreamName from = current_stream(source.device().index());
  const StreamName to = current_stream(target.device().index());
  Aliases aliases;
  AccessList accesses;
  accesses.read(source);
  accesses.write(target);
  accelerator.wait(from, accelerator.record(to));
  Work work;
  work.run = copying(aliases.of(target), aliases.of(source));
  work.cost = {WorkKind::copy_peer, static_cast<double>(target.nbytes()), 0};
  work.accesses = std::move(accesses).take();
  work.site = here("aten::copy_");
  accelerator.submit(from, std::move(work));
  accelerator.wait(to, accelerator.record(from));
}

void finish(const at::Tensor& on_device, bool non_blocking) {
  if (!non_blocking) Accelerator::get().synchronize(current_stream(on_device.device().index()));
}

void enqueue_transfer(const at::Tensor& on_device, std::function<void()> run, AccessList&& accesses, WorkKind kind) {
  const int device = on_device.device().index();
  Work work;
  work.run = std::move(run);
  work.cost = {kind, static_cast<double>(on_device.nbytes()), 0};
  work.accesses = std::move(accesses).take();
  work.site = here("aten::copy_");
  Accelerator::get().submit(current_stream(device), std::move(work));
}

void copy_in(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  Aliases aliases;
  AccessList accesses;
  accesses.write(target);
  if (is_pinned(source) && read_in_stream(target, source, non_blocking)) {
    accesses.read(source);
    watch_host();
    // Pinned memory is not kept alive either: its allocator knows the streams that use it.
    enqueue_transfer(target, copying(aliases.of(target), aliases.of(source)), std::move(accesses), WorkKind::copy_in);
  } else {
    note_host_read(source, "aten::copy_");
    enqueue_transfer(target, copying(aliases.of(target), host_copy(source)), std::move(accesses), WorkKind::copy_in);
  }
  finish(target, non_blocking);
}

void copy_out(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  Aliases aliases;
  AccessList accesses;
  accesses.read(source);
  if (is_pinned(target)) {
    accesses.write(target);
    watch_host();
    enqueue_transfer(source, copying(aliases.of(target), aliases.of(source)), std::move(accesses), WorkKind::copy_out);
    finish(source, non_blocking && written_in_stream(target, source));
  } else {
    enqueue_transfer(source, copying(target, aliases.of(source)), std::move(accesses), WorkKind::copy_out);
    finish(source, false);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  copy_tensor(dst, self, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  copy_tensor(dst, self, false);
  return dst;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::Tensor value = at::empty(self.sizes(), self.options().device(c10::kCPU));
  copy_out(value, self, false);
  return value.item();
}

}  // namespace

void copy_tensor(const at::Tensor& target, const at::Tensor& source, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (target.is_same(source)) return;
  const at::Tensor from = source.sizes() == target.sizes() ? source : source.expand(target.sizes());
  if (target.numel() == 0) return;
  if (target.is_privateuseone() && source.is_privateuseone()) {
    target.device() == source.device() ? copy_within(target, from) : copy_between(target, from);
  } else if (target.is_privateuseone()) {
    TORCH_CHECK(source.is_cpu(), "cannot copy from ", source.device(), " to ", target.device());
    copy_in(target, from, non_blocking);
  } else {
    TORCH_CHECK(target.is_cpu(), "cannot copy from ", source.device(), " to ", target.device());
    copy_out(target, from, non_blocking);
  }
}

void write_host_tensor(const at::Tensor& target, const at::Tensor& source) {
  if (target.numel() == 0) return;
  Aliases aliases;
  AccessList accesses;
  accesses.write(target);
  enqueue_transfer(target, copying(aliases.of(target), source), std::move(accesses), WorkKind::copy_in);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
}

// The fallbacks of these keys would clone, and so copy, without end: our copies handle the conjugate and negative bits.
// record_stream concerns only the memory: torch would make a copy, and record the copy.
constexpr const char* kOfBytes[] = {"_copy_from", "record_stream"};
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  for (const char* name : kOfBytes) m.impl(name, torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  for (const char* name : kOfBytes) m.impl(name, torch::CppFunction::makeFallthrough());
}

}  // namespace sim
