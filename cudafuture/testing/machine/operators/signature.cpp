#include "machine/operators/signature.h"

#include <bit>
#include <functional>
#include <string_view>

#include "machine/operators/facts.h"
#include "machine/operators/values.h"

namespace machine {
namespace {

enum Tag : std::int64_t {
  kTensor,
  kNoTensor,
  kNone,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kDevice,
  kGenerator,
  kList
};

std::int64_t bits(double x) { return std::bit_cast<std::int64_t>(x); }

void write_tensor(const at::Tensor& tensor, Signature& out) {
  if (!tensor.defined()) {
    out.push_back(kNoTensor);
    return;
  }
  const c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  const auto flags = static_cast<std::int64_t>(impl->is_wrapped_number()) | tensor.is_cpu() << 1 |
                     tensor.is_conj() << 2 | tensor.is_neg() << 3;
  out.push_back(kTensor | flags << 8 | static_cast<std::int64_t>(tensor.scalar_type()) << 16 | tensor.dim() << 32);
  out.append(impl->sizes().begin(), impl->sizes().end());
  out.append(impl->strides().begin(), impl->strides().end());
}

void write_pair(Tag tag, std::int64_t value, bool skip_value, Signature& out) {
  out.push_back(tag);
  if (!skip_value) out.push_back(value);
}

bool write_value(const c10::IValue& value, bool skip_numbers, Signature& out);

bool write_list(const c10::IValue& value, bool skip_numbers, Signature& out) {
  const auto items = value.toListRef();
  out.push_back(kList | static_cast<std::int64_t>(items.size()) << 8);
  for (const c10::IValue& item : items) {
    if (!write_value(item, skip_numbers, out)) return false;
  }
  return true;
}

bool write_int_list(const c10::List<std::int64_t>& list, Signature& out) {
  out.push_back(kList | static_cast<std::int64_t>(list.size()) << 8);
  for (const std::int64_t item : list) out.push_back(item);
  return true;
}

bool write_value(const c10::IValue& value, bool skip_numbers, Signature& out) {
  if (value.isTensor()) {
    write_tensor(value.toTensor(), out);
  } else if (value.isNone()) {
    out.push_back(kNone);
  } else if (value.isInt()) {
    write_pair(kInt, value.toInt(), skip_numbers, out);
  } else if (value.isDouble()) {
    write_pair(kDouble, bits(value.toDouble()), skip_numbers, out);
  } else if (value.isBool()) {
    write_pair(kBool, value.toBool(), skip_numbers, out);
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    write_pair(kComplex, bits(number.real()), skip_numbers, out);
    if (!skip_numbers) out.push_back(bits(number.imag()));
  } else if (value.isString()) {
    write_pair(kString, static_cast<std::int64_t>(std::hash<std::string_view>()(value.toStringView())), false, out);
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    write_pair(kDevice, static_cast<std::int64_t>(device.type()) << 8 | device.index(), false, out);
  } else if (value.isGenerator()) {
    out.push_back(kGenerator);
  } else if (value.isIntList()) {
    return write_int_list(value.toIntList(), out);
  } else if (value.isList()) {
    return write_list(value, skip_numbers, out);
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool write_signature(const Facts& facts, c10::ArrayRef<c10::IValue> arguments, Signature& signature) {
  signature.push_back(static_cast<std::int64_t>(c10::get_default_dtype_as_scalartype()));  // of int / int, for example
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (!write_value(arguments[i], facts.arguments[i].is_number && !facts.numbers_matter, signature)) return false;
  }
  return true;
}

}  // namespace machine
