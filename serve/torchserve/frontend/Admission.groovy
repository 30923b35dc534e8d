import groovy.transform.CompileDynamic
import groovy.transform.CompileStatic
import java.util.concurrent.TimeUnit
import java.util.concurrent.atomic.AtomicInteger
import java.util.concurrent.atomic.AtomicLong
import org.pytorch.serve.ModelServer
import org.pytorch.serve.job.Job
import org.pytorch.serve.util.messages.InputParameter
import org.pytorch.serve.wlm.Model
import org.pytorch.serve.wlm.ModelManager

/**
 * What all connections together have been promised: requests that are to be answered, and the bytes of their bodies, from
 * their announcement in a header to the last byte of the answer, wherever TorchServe holds them meanwhile.
 */
@CompileStatic
class Admission {
    final long bodyBytes
    final long receiveMs
    private final long heldBytes
    private final int mostConnections
    private final AtomicInteger connections = new AtomicInteger()
    private final AtomicLong requests = new AtomicLong()
    private final AtomicLong held = new AtomicLong()
    private final AtomicLong abandoned = new AtomicLong()
    volatile boolean draining = false

    /**
     * @param bodyBytes most of one body
     * @param heldBytes most of all bodies together
     * @param receiveMs most time for a request to arrive
     * @param mostConnections of clients at once
     */
    Admission(long bodyBytes, long heldBytes, long receiveMs, int mostConnections) {
        this.bodyBytes = bodyBytes
        this.heldBytes = heldBytes
        this.receiveMs = receiveMs
        this.mostConnections = mostConnections
        Thread sweeper = new Thread(this.&sweep as Runnable, 'abandoned')
        sweeper.setDaemon(true)
        sweeper.start()
    }

    /** Count a connection; false where it is one too many. */
    boolean connect() {
        return connections.incrementAndGet() <= mostConnections
    }

    void disconnect() {
        connections.decrementAndGet()
    }

    void begin() {
        requests.incrementAndGet()
    }

    void end() {
        requests.decrementAndGet()
    }

    /** Take so many bytes; false, and none are taken, where there is no room. */
    boolean take(long bytes) {
        if (held.addAndGet(bytes) + abandoned.get() > heldBytes) {
            held.addAndGet(-bytes)
            return false
        }
        return true
    }

    void give(long bytes) {
        held.addAndGet(-bytes)
    }

    /** Bytes of a client that has gone are given back when no queue and no worker holds them any more. */
    void abandon(long bytes) {
        abandoned.addAndGet(bytes)
        held.addAndGet(-bytes)
    }

    private void sweep() {
        while (true) {
            Thread.sleep(100)
            long before = abandoned.get()
            if (before > 0) {
                try {
                    long left = Math.min(dropAbandoned(), before)
                    abandoned.addAndGet(left - before)
                } catch (RuntimeException ignored) {
                    // A batch changed while it was counted: the next time.
                }
            }
        }
    }

    /** Take requests whose clients have gone out of the queues: nobody waits for them. Bytes that workers still hold. */
    @CompileDynamic
    private static long dropAbandoned() {
        ModelManager manager = ModelManager.getInstance()
        long bytes = 0
        manager.getAllModels().each { models ->
            models.value.getAllVersions().each { version ->
                Model model = version.value
                model.@jobsDb.values().each { queue -> queue.removeIf { Job job -> !ModelQueue.isWanted(job) } }
                manager.getWorkers(model.getModelVersionName()).each { worker ->
                    List<Job> held = worker.@aggregator instanceof Batches ? worker.@aggregator.held() : []
                    bytes += held.sum(0L) { Job job -> ModelQueue.isWanted(job) ? 0L : size(job) } as long
                }
            }
        }
        return bytes
    }

    private static long size(Job job) {
        long bytes = 0
        for (InputParameter parameter : job.getPayload().getParameters()) {
            bytes += parameter.getValue().length
        }
        return bytes
    }

    /** Refuse what comes and wait for what was accepted; returns how many requests are left when the time is over. */
    long drain(long mostMs, ModelServer server) {
        draining = true
        long end = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(mostMs)
        List<io.grpc.Server> calls = grpcServers(server)
        calls.each { it.shutdown() }  // which lets those under way end
        while (System.nanoTime() < end && (requests.get() > 0 || calls.any { !it.isTerminated() })) {
            Thread.sleep(20)
        }
        calls.each { it.shutdownNow() }
        return requests.get()
    }

    @CompileDynamic
    private static List<io.grpc.Server> grpcServers(ModelServer server) {
        return [server.@inferencegRPCServer, server.@managementgRPCServer].findAll { it != null }
    }
}
