import groovy.transform.CompileStatic
import java.util.concurrent.ConcurrentHashMap
import java.util.concurrent.LinkedBlockingDeque
import java.util.concurrent.TimeUnit
import org.pytorch.serve.archive.model.ModelException
import org.pytorch.serve.job.GRPCJob
import org.pytorch.serve.job.Job
import org.pytorch.serve.util.messages.WorkerCommands
import org.pytorch.serve.wlm.Model
import org.pytorch.serve.wlm.ModelManager

/**
 * What waits for one version of a model, in the place of TorchServe's deque: it takes nothing that no worker is there for,
 * always has room for what is put back (0.12 ends a worker that has none), and can be closed. It knows each request that
 * it took until that is answered.
 */
@CompileStatic
class ModelQueue extends LinkedBlockingDeque<Job> {
    private static final long LEAST_DELAY_MS = 1

    private final Model model
    private final int most
    private final LinkedBlockingDeque<Job> before
    private final ThreadLocal<Integer> room = ThreadLocal.withInitial { 0 }  // of the batch that this thread takes
    private final Set<Job> unanswered = ConcurrentHashMap.newKeySet()
    private boolean closed = false

    /**
     * @param model whose requests they are
     * @param before TorchServe's deque, which may hold some, and gets one more from a thread that had found it already
     */
    ModelQueue(Model model, LinkedBlockingDeque<Job> before) {
        this.model = model
        this.before = before
        this.most = before.remainingCapacity() + before.size()
    }

    /** By this TorchServe adds a request; false: it answers 503, of which `Answers` makes words. */
    @Override
    boolean offer(Job job) {
        synchronized (this) {
            if (!closed) {
                return size() < most && Models.hasReadyWorker(model) && accept(job)
            }
        }
        return passOn(job)
    }

    private boolean accept(Job job) {
        unanswered.add(job)
        return super.offer(job)
    }

    /** The version was looked up before another one became the default: that one answers. */
    private boolean passOn(Job job) {
        if (job.getModelVersion() != null) {
            return false
        }
        try {
            Model now = ModelManager.getInstance().getModel(job.getModelName(), null)
            return now != null && !now.is(model) && ModelManager.getInstance().addJob(job)
        } catch (ModelException ignored) {
            return false
        }
    }

    /**
     * By this TorchServe takes a batch: its first request after however long, then as many as come within maxBatchDelay,
     * of which 1 ms is the least that it knows (with 0 its batches hold two). That least is none here: a lone request has
     * nobody to wait for, and while the worker is busy those of the next batch come together by themselves.
     *
     * A batch is two of the network's (see `model_config`): both are taken where both wait, so that the worker decodes
     * one while it computes the other, and else one at most: what comes meanwhile is better off in the next batch.
     */
    @Override
    Job poll(long timeout, TimeUnit unit) {
        if (timeout == Long.MAX_VALUE) {
            Job first = super.poll(timeout, unit)
            int whole = model.getBatchSize()
            room.set((size() + 1 >= whole ? whole : (whole + 1).intdiv(2)) - 1)
            return first
        }
        if (room.get() == 0) {
            return null
        }
        room.set(room.get() - 1)
        return unit.toMillis(timeout) <= LEAST_DELAY_MS ? poll() : super.poll(timeout, unit)
    }

    /**
     * Add to a batch that this thread has taken what waits and has room in it. 0.12 goes on to the next request only while
     * maxBatchDelay lasts, which is 1 ms: a thread that was kept from its core for so long leaves with a few of many.
     */
    void fill(Map<String, Job> batch) {
        boolean open = batch.values().every { Job job -> goesWithOthers(job) }
        while (open && room.get() > 0) {
            Job job = poll()
            open = job != null && goesWithOthers(job)
            if (open) {
                room.set(room.get() - 1)
                batch.put(job.getJobId(), job)
            } else if (job != null) {
                addFirst(job)
            }
        }
        room.set(0)
    }

    /** Whether a request goes with others. */
    private static boolean goesWithOthers(Job job) {
        return job.getCmd() == WorkerCommands.PREDICT
    }

    @Override
    int remainingCapacity() {
        return Math.max(0, most - size())
    }

    /** Whether `offer` would refuse a request for want of room, whoever brings it. */
    boolean isFull() {
        return !isClosed() && size() >= most
    }

    /** Whether a request is to be answered by who asks: once. */
    boolean take(Job job) {
        return unanswered.remove(job)
    }

    /** Answer that it was not to be, unless it is answered. */
    void refuse(Job job, String message) {
        if (take(job)) {
            job.sendError(503, message)
        }
    }

    /** The longest that a worker may take for what waits and for what it has. */
    long getPatienceS() {
        return 2L * model.getResponseTimeout() + 10L
    }

    synchronized boolean isClosed() {
        return closed
    }

    synchronized void close() {
        closed = true
    }

    synchronized void reopen() {
        closed = false
    }

    /** Whether all that was taken is answered, or nobody waits for it any more. */
    boolean isSettled() {
        forgetThoseGone()
        return unanswered.isEmpty()
    }

    private void forgetThoseGone() {
        unanswered.removeIf { Job job -> !isWanted(job) }
    }

    /** Whether somebody still waits for the answer: 0.12 says the contrary of a gRPC call, or does not know. */
    static boolean isWanted(Job job) {
        try {
            return job instanceof GRPCJob ? !job.isOpen() : job.isOpen()
        } catch (NullPointerException ignored) {
            return true
        }
    }

    /** Why a request that comes now is not taken. */
    String refusal() {
        String name = model.getModelName()
        return Models.hasReadyWorker(model) ? "the queue of $name is full: try again"
                : "no worker of $name is running: try again later"
    }

    /** Answer what waits where no worker is left, and take over what went to TorchServe's deque. */
    void sweep() {
        forgetThoseGone()
        for (Job job = before.poll(); job != null; job = before.poll()) {
            if (!offer(job)) {
                job.sendError(503, refusal())
            }
        }
        if (!isEmpty() && !Models.hasReadyWorker(model)) {
            for (Job job = poll(); job != null; job = poll()) {
                refuse(job, refusal())
            }
        }
    }
}
