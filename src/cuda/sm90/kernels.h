// SPDX-License-Identifier: Apache-2.0
// All tables of sm90.
#pragma once

#include "cuda/sm90/backward/apart/kernels.h"
#include "cuda/sm90/backward/kernels.h"
#include "cuda/sm90/dbias/kernels.h"
#include "cuda/sm90/decode/kernels.h"
#include "cuda/sm90/forward/kernels.h"
#include "cuda/sm90/fp8/kernels.h"
#include "cuda/sm90/mla/kernels.h"
#include "cuda/sm90/wide/kernels.h"
