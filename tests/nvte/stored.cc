// SPDX-License-Identifier: Apache-2.0
// Where an element of a layout lies, read off the layout's name.
#include <sstream>

#include "nvte/problems.h"

namespace nvte_test {

Stored::Stored(const std::string& layout, const Attention& attention, int64_t dqk, int64_t dv,
               int32_t page_size)
    : attention_(attention), dqk_(dqk), dv_(dv), page_size_(page_size) {
  std::istringstream words(layout);
  for (std::string word; std::getline(words, word, '_');) {
    if (word != "paged" && word != "kv") parts_.push_back(word);
  }
}

bool Stored::packed(int tensor) const {
  return parts_[static_cast<size_t>(part(tensor))].find('t') != std::string::npos;
}

int64_t Stored::extent(char axis, int tensor) const {
  const Lengths& lengths = tensor ? attention_.k : attention_.q;
  switch (axis) {
    case 'b':
      return tensor && paged() ? attention_.q.b() * max_pages() + 1 : attention_.q.b();
    case 's':
      return tensor ? (paged() ? page_size_ : attention_.sk) : attention_.sq;
    case 't':
      return lengths.cu(lengths.gap).back() + 2;  // and a tail
    case 'h':
      return tensor ? attention_.hk : attention_.hq;
    case 'd':
      return tensor == 2 ? dv_ : dqk_;
    default:
      return axis - '0';
  }
}

int64_t Stored::offset_of(int tensor, int64_t n, int64_t i, int64_t head, int64_t e) const {
  const std::string& axes = parts_[static_cast<size_t>(part(tensor))];
  int64_t offset = 0;
  for (const char axis : axes) {
    int64_t index = 0;
    if (axis == 'b') index = n;
    if (axis == 's' || axis == 't') index = i;
    if (axis == 'h') index = head;
    if (axis == 'd') index = e;
    if (axis == '3') index = tensor;
    if (axis == '2') index = tensor - 1;
    offset = offset * extent(axis, tensor) + index;
  }
  return offset;
}

int64_t Stored::offset(int tensor, int64_t n, int64_t i, int64_t head, int64_t e) const {
  const Lengths& lengths = tensor ? attention_.k : attention_.q;
  if (tensor && paged()) {
    const int64_t page = table()[static_cast<size_t>(n * max_pages() + i / page_size_)];
    return offset_of(tensor, page, i % page_size_, head, e);
  }
  if (packed(tensor)) i += lengths.cu(lengths.gap)[static_cast<size_t>(n)];
  return offset_of(tensor, n, i, head, e);
}

std::vector<int32_t> Stored::table() const {
  std::vector<int32_t> pages(static_cast<size_t>(attention_.q.b() * max_pages()));
  const auto count = static_cast<int32_t>(pages.size());
  for (int32_t i = 0; i < count; ++i) pages[static_cast<size_t>(i)] = count - i;
  return pages;
}

int64_t Stored::part_numel(int part) const {
  const int tensor = parts_.size() == 3 ? part : part ? 1 : 0;
  int64_t numel = 1;
  for (const char axis : parts_[static_cast<size_t>(part)]) numel *= extent(axis, tensor);
  return numel;
}

std::vector<size_t> Stored::shape(int tensor) const {
  std::vector<size_t> shape;
  for (const char axis : parts_[static_cast<size_t>(part(tensor))]) {
    if (axis != '2' && axis != '3') shape.push_back(static_cast<size_t>(extent(axis, tensor)));
  }
  return shape;
}

}  // namespace nvte_test
